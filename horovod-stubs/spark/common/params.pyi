from horoclone.spark.common.params import (
    ESTIMATOR_TABLE as ESTIMATOR_TABLE,
    EstimatorParams as EstimatorParams,
    MODEL_TABLE as MODEL_TABLE,
    ModelParams as ModelParams,
    PETASTORMS as PETASTORMS,
    Row as Row,
    accessors as accessors,
    defaults as defaults,
)
