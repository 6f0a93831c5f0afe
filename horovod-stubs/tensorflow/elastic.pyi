from horoclone.tensorflow.elastic import *
