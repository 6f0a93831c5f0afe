from horoclone.spark import *
from horovod.spark import common as common
from horovod.spark import conf as conf
from horovod.spark import keras as keras
from horovod.spark import runner as runner
from horovod.spark import torch as torch
