from horoclone.spark import (
    run as run,
    run_elastic as run_elastic,
)
from horovod.spark import common as common
from horovod.spark import conf as conf
from horovod.spark import keras as keras
from horovod.spark import runner as runner
from horovod.spark import torch as torch
