from horoclone.ray import *
from horovod.ray import adapter as adapter
from horovod.ray import elastic as elastic
from horovod.ray import elastic_v2 as elastic_v2
from horovod.ray import ray_logger as ray_logger
from horovod.ray import runner as runner
from horovod.ray import strategy as strategy
from horovod.ray import utils as utils
from horovod.ray import worker as worker
