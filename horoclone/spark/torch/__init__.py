"""Under Horovod's name: TorchEstimator and TorchModel for Spark's DataFrames."""

from horoclone.spark.common import params  # noqa: F401 - first, as it says how to get PySpark
from horoclone.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
