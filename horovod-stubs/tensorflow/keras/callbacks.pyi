from horoclone.tensorflow.keras.callbacks import *
