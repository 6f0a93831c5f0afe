from horoclone.torch.operations.messages import *
from horoclone.ops import *
from horoclone.runtime.exported import *
from horoclone.torch.mpi_ops import *
from horoclone.torch.operations.rooted import *
from horoclone.torch import *
from horovod.torch import elastic as elastic
