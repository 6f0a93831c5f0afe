from horoclone.tensorflow.keras.elastic import *
