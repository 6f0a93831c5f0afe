from horoclone.spark.common.util import *
