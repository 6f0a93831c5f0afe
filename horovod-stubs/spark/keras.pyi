from horoclone.spark.keras import (
    KerasEstimator as KerasEstimator,
    KerasModel as KerasModel,
)
