"""Under Horovod's name: KerasEstimator and KerasModel for Spark's DataFrames."""

from horoclone.spark.common import params  # noqa: F401 - first, as it says how to get PySpark
from horoclone.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
