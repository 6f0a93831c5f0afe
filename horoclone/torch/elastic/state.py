"""The states of elastic training, which is not supported yet: each name raises Unsupported on use."""

from horoclone.stand_ins import ELASTIC, stand_in

TorchState = stand_in("hvd.elastic.TorchState", ELASTIC)
StateHandler = stand_in("hvd.elastic.state.StateHandler", ELASTIC)
ModelStateHandler = stand_in("hvd.elastic.state.ModelStateHandler", ELASTIC)
OptimizerStateHandler = stand_in("hvd.elastic.state.OptimizerStateHandler", ELASTIC)
SamplerStateHandler = stand_in("hvd.elastic.state.SamplerStateHandler", ELASTIC)
get_handler_registry = stand_in("hvd.elastic.state.get_handler_registry", ELASTIC)
set_handler_registry = stand_in("hvd.elastic.state.set_handler_registry", ELASTIC)

__all__ = [
    "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler", "TorchState",
    "get_handler_registry", "set_handler_registry",
]  # fmt: skip
