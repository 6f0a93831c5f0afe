from horoclone.spark.common.util import (
    check_validation as check_validation,
    host_hash as host_hash,
    is_databricks as is_databricks,
)
