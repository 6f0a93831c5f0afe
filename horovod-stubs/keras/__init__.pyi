from horoclone.ops import *
from horoclone.runtime.exported import *
from horoclone.keras import *
from horovod.keras import callbacks as callbacks
from horovod.keras import elastic as elastic
