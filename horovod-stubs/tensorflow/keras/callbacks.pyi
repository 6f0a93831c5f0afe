from horoclone.tensorflow.keras.callbacks import (
    BestModelCheckpoint as BestModelCheckpoint,
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
    MetricAverageCallback as MetricAverageCallback,
    MetricsCallback as MetricsCallback,
)
