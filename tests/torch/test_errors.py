"""The table of errors, seen from torch: which exception, what it names, and that the runtime works afterwards."""

from __future__ import annotations

import pytest
import torch
from world import raised, ranks

import horoclone.torch as hvd


def still_works() -> None:
    """Also unnamed operations still match: every rank has counted alike."""
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="named").tolist() == [float(hvd.size())] * 3


@ranks(2)
def test_tensors_that_cannot_be_passed() -> None:
    every_call = {
        "allreduce": lambda t: hvd.allreduce(t),
        "allreduce_": lambda t: hvd.allreduce_(t),
        "allreduce_async_": lambda t: hvd.allreduce_async_(t),
        "grouped_allreduce": lambda t: hvd.grouped_allreduce([torch.ones(1), t]),
        "allgather": lambda t: hvd.allgather(t),
        "broadcast": lambda t: hvd.broadcast(t, 0),
        "broadcast_": lambda t: hvd.broadcast_(t, 0),
        "alltoall": lambda t: hvd.alltoall(t),
        "reducescatter": lambda t: hvd.reducescatter(t),
        "reduce": lambda t: hvd.reduce(t, 0),
        "reduce_": lambda t: hvd.reduce_(t, 0),
        "gather": lambda t: hvd.gather(t, 0),
    }
    for name, call in every_call.items():
        error = raised(lambda call=call: call(torch.ones(4, 6).t()))
        assert type(error) is ValueError and str(error) == "Tensor is required to be contiguous.", name
        error = raised(lambda call=call: call(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)))
        assert type(error) is ValueError
        assert str(error).startswith(
            "Tensor type torch.quantized.QInt8Tensor is not supported. The unnamed tensor"
        )
        assert "torch.qint8" in str(error) and "int_repr()" in str(error)
        error = raised(lambda call=call: call(torch.ones(4, 4).to_sparse()))
        assert isinstance(error, ValueError) and "sparse" in str(error), name
        error = raised(lambda call=call: call(torch.ones(4, device="meta")))
        assert isinstance(error, hvd.Unsupported) and "device meta" in str(error), name
    error = raised(lambda: hvd.allreduce(torch.ones(4, device="meta"), name="layer3.weight"))
    assert "layer3.weight" in str(error) and ".cpu()" in str(error)
    still_works()


@ranks(2)
def test_a_handle_that_nobody_waits_for_is_no_harm() -> None:
    handle = hvd.allreduce_async(torch.ones(1), name="waited for on rank 1")
    if hvd.rank() == 1:
        hvd.synchronize(handle)
    still_works()


@ranks(2, dies=[1])
def test_death_of_a_rank_during_an_optimizer_step_names_it_and_the_bucket() -> None:
    import os
    import signal

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    error = raised(step)
    assert isinstance(error, hvd.PeerLost) and error.rank == 1, repr(error)
    assert "rank 1" in str(error) and "allreduce 'bias and 1 more (gradients." in str(error), str(error)
    optimizer.zero_grad()  # nothing is outstanding after the error


@ranks(1)
def test_a_pending_negation_or_conjugation_is_not_lost() -> None:
    hvd.allreduce_(torch.ones(1))  # opens the fast path
    for tensor in (torch.tensor(1 + 2j).conj().imag, torch.tensor([1 + 2j]).conj().imag):
        assert tensor.is_neg()
        for call in (
            hvd.allreduce, hvd.allgather, hvd.allreduce_, lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.synchronize(hvd.allreduce_async(x)), lambda x: hvd.grouped_allreduce([x]),
            lambda x: hvd.grouped_allreduce_([torch.ones(1), x]),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="resolve_neg"):
                call(tensor)
