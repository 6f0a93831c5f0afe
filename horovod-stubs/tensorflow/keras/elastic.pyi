from horoclone.tensorflow.keras.elastic import (
    CommitStateCallback as CommitStateCallback,
    KerasState as KerasState,
    UpdateBatchStateCallback as UpdateBatchStateCallback,
    UpdateEpochStateCallback as UpdateEpochStateCallback,
    run as run,
)
