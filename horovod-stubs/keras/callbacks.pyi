from horoclone.keras.callbacks import *
