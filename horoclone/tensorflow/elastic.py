"""Elastic training, which is not supported yet: the names can be imported and raise Unsupported on use."""

from horoclone.common.elastic import ObjectState, State
from horoclone.stand_ins import ELASTIC, stand_in

run = stand_in("hvd.elastic.run", ELASTIC)
TensorFlowState = stand_in("hvd.elastic.TensorFlowState", ELASTIC)
TensorFlowKerasState = stand_in("hvd.elastic.TensorFlowKerasState", ELASTIC)

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
