from horoclone.spark.torch import (
    TorchEstimator as TorchEstimator,
    TorchModel as TorchModel,
)
