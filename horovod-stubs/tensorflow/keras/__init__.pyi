from horoclone.ops import *
from horoclone.runtime.exported import *
from horoclone.keras import *
from horoclone.tensorflow.keras import *
from horovod.tensorflow.keras import callbacks as callbacks
from horovod.tensorflow.keras import elastic as elastic
