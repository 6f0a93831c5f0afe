from horoclone.ops import *
from horoclone.runtime.exported import *
from horoclone.tensorflow.mpi_ops import *
from horoclone.tensorflow import *
from horovod.tensorflow import elastic as elastic
from horovod.tensorflow import keras as keras
