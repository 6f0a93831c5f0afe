from horovod.spark.common import backend as backend
from horovod.spark.common import params as params
from horovod.spark.common import store as store
from horovod.spark.common import util as util
