from horoclone.keras.elastic import *
