from horoclone.spark.common.backend import (
    Backend as Backend,
    SparkBackend as SparkBackend,
    default_num_proc as default_num_proc,
)
