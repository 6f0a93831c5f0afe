"""The elastic states and callbacks for Keras, which are not supported yet: each name raises Unsupported on use."""

from horoclone.stand_ins import ELASTIC, stand_in

run = stand_in("hvd.elastic.run", ELASTIC)
KerasState = stand_in("hvd.elastic.KerasState", ELASTIC)
CommitStateCallback = stand_in("hvd.elastic.CommitStateCallback", ELASTIC)
UpdateBatchStateCallback = stand_in("hvd.elastic.UpdateBatchStateCallback", ELASTIC)
UpdateEpochStateCallback = stand_in("hvd.elastic.UpdateEpochStateCallback", ELASTIC)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
