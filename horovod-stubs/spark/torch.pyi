from horoclone.spark.torch import *
