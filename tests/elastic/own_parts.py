"""A worker of test_shards.py: a local layer with momentum, and a compressor's residuals. `own_parts.py STEPS PAUSE_S`.

Before a commit each rank writes into its Owned attribute what these are; where a generation begins they are compared.
Exits with an AssertionError where something is not as it was. OWN_ONCE: a folder; a slot gets one worker only.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import horoclone.torch as hvd

STEPS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])
if "OWN_ONCE" in os.environ:
    Path(os.environ["OWN_ONCE"], os.environ["HOROVOD_RANK"]).touch(exist_ok=False)


def out(*words: object) -> None:
    print(*words, flush=True)


hvd.init()
torch.manual_seed(7)
local = torch.nn.Linear(20, 20)
model = torch.nn.Sequential(local, torch.nn.Tanh(), torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
    model.named_parameters(),
    compression=hvd.Compression.topk(ratio=0.1),
    local_parameters=local,
)
state = hvd.elastic.TorchState(model, optimizer, mine=hvd.elastic.Owned(None), step=0)


def weights_of_this_rank() -> list[Any]:
    moments = [optimizer.state[p].get("momentum_buffer") for p in local.parameters() if p in optimizer.state]
    return [t.detach().clone() for t in (*local.parameters(), *moments) if t is not None]


def residuals() -> dict[str, torch.Tensor]:
    reducer = optimizer._reducer
    return {name: one.clone() for name, one in reducer.residuals.read(reducer.buckets).items()}


def check() -> None:
    """This rank's layer is as it was, and all residuals together are, whoever has them now."""
    if state.mine.value is None or not state.pieces("mine"):
        return
    kept = state.mine.value["weights"]
    now = weights_of_this_rank()
    assert len(now) == len(kept) and all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    others = hvd.allgather_object(now[0].sum().item())
    assert len(set(others)) == len(others), "local layers are alike"
    before = [one["residuals"] for one in state.pieces("mine")]
    after = hvd.allgather_object(residuals())
    assert before[0] and any(one.abs().sum() > 0 for one in before[0].values())
    for name in before[0]:
        whole, here = (sum(rank[name] for rank in ranks if name in rank) for ranks in (before, after))
        assert torch.allclose(whole, here, atol=1e-5), name
    weights = hvd.allgather_object([p.detach() for p in model[2].parameters()])
    assert all(torch.equal(a, b) for one in weights for a, b in zip(one, weights[0], strict=True))
    out("checked", hvd.elastic.generation().number, hvd.rank(), "of", hvd.size())


@hvd.elastic.run
def train(state: Any) -> None:
    now = hvd.elastic.generation()
    check()
    out("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
        "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync)  # fmt: skip
    while state.step < STEPS:
        optimizer.zero_grad()
        data = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()))
        model(data).square().sum().backward()
        optimizer.step()
        state.step += 1
        out("step", state.step, "of", now.number, f"at {time.time():.4f}")
        if state.step % 2 == 0:
            state.mine.value = {"weights": weights_of_this_rank(), "residuals": residuals()}
            state.commit()
        time.sleep(PAUSE_S)


train(state)
