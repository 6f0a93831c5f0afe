"""Elastic training, which is not supported yet: the names can be imported and raise Unsupported on use."""

from horoclone.common.elastic import ObjectState, State
from horoclone.stand_ins import ELASTIC, stand_in
from horoclone.torch.elastic import sampler, state
from horoclone.torch.elastic.sampler import ElasticSampler
from horoclone.torch.elastic.state import TorchState

run = stand_in("hvd.elastic.run", ELASTIC)

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "sampler", "state"]
