"""Elastic training with PyTorch: `hvd.elastic.run`, `TorchState` and `ElasticSampler`. See docs/elastic.md."""

import importlib

from horoclone.elastic import member
from horoclone.elastic.generation import Generation, generation
from horoclone.elastic.randomness import RandomStates
from horoclone.elastic.recovery import Recovery, last_recovery
from horoclone.elastic.run import run, run_fn
from horoclone.elastic.state import ObjectState, State
from horoclone.errors import StateLost
from horoclone.owned import Owned
from horoclone.torch.elastic import sampler, state
from horoclone.torch.elastic.sampler import ElasticSampler
from horoclone.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler", "Generation", "ObjectState", "Owned", "RandomStates", "Recovery", "State", "StateLost",
    "TorchState", "generation", "last_recovery", "run", "run_fn", "sampler", "state",
]  # fmt: skip

if member.is_elastic():
    # torch loads these 800 modules with the first optimizer. A worker that comes to a running job makes its optimizer
    # after init(), when all others wait for it in sync().
    importlib.import_module("torch._dynamo")
