"""horoclone on Spark: `run` and `run_elastic` put ranks into the tasks of a Spark application; estimators for
DataFrames are in `horoclone.spark.torch` and `horoclone.spark.keras`.

The names are those of `horovod.spark`. PySpark is imported when it is used. docs/spark.md tells who starts whom.
"""

from __future__ import annotations

from horoclone.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
