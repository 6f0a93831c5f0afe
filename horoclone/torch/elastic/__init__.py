"""Elastic training with PyTorch: `hvd.elastic.run`, `TorchState` and `ElasticSampler`. See docs/elastic.md."""

from horoclone.elastic.generation import Generation, generation
from horoclone.elastic.run import run, run_fn
from horoclone.elastic.state import ObjectState, State
from horoclone.torch.elastic import sampler, state
from horoclone.torch.elastic.sampler import ElasticSampler
from horoclone.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler", "Generation", "ObjectState", "State", "TorchState", "generation", "run", "run_fn", "sampler",
    "state",
]  # fmt: skip
