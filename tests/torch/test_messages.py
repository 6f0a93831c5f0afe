"""send, recv, isend and irecv of torch tensors; what goes wrong names both ranks, a lost partner included."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from world import ranks

import horoclone.torch as hvd
from horoclone import ops

DTYPES = [getattr(torch, name) for name in ops.DTYPES]


@ranks(2)
def test_every_dtype_and_shape_arrives() -> None:
    for dtype in DTYPES:
        for shape in [(), (0, 3), (5,), (33, 9, 2), (70_000,)]:
            message = (torch.arange(torch.Size(shape).numel()) % 2).view(shape).to(dtype)
            if hvd.rank() == 0:
                assert hvd.send(message, 1) is None
                hvd.send(message, 1, tag=3)
                continue
            found = hvd.recv(None, 0)
            target = torch.empty(shape, dtype=dtype)
            assert hvd.recv(target, src=0, tag=3) is target
            for got in (found, target):
                assert got.dtype == dtype and got.shape == shape and torch.equal(got, message)


@ranks(2)
def test_wrong_arguments_raise_at_once() -> None:
    one = torch.ones(3)
    for call, text in (
        (lambda: hvd.send(one, 2), "not one of the job's 2 ranks"),
        (lambda: hvd.send(one, -1), "dst=-1"),
        (lambda: hvd.recv(one, "first"), "src='first'"),
        (lambda: hvd.send(one, 1, tag=-4), "tag -4 is negative"),
        (lambda: hvd.recv(torch.ones(4)[::2], 1), "contiguous"),
        (lambda: hvd.send(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), 1), "not supported"),
        (lambda: hvd.send([1, 2], 1), "torch.Tensor, not list"),
        (lambda: hvd.recv(3, 1), "torch.Tensor, not int"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(hvd.Unsupported, match="device meta"):
        hvd.isend(torch.ones(2, device="meta"), 1)


@ranks(2, dies=[1])
def test_a_partner_that_dies_is_named_by_everything_that_waits_for_it() -> None:
    if hvd.rank() == 1:
        hvd.recv(None, 0, tag=9)
        os.kill(os.getpid(), signal.SIGKILL)
    pending = {
        "small send to rank 1": hvd.isend(torch.ones(3), 1),
        "large send to rank 1": hvd.isend(torch.ones(1_000_000), 1, tag=1),
        "recv from rank 1": hvd.irecv(torch.ones(1_000_000), 1, tag=2),
        "recv from any rank": hvd.irecv(None, None, tag=3),
    }
    assert not any(hvd.poll(handle) for handle in pending.values())
    hvd.isend(torch.ones(1), 1, tag=9)
    for what, handle in pending.items():
        with pytest.raises(hvd.PeerLost) as caught:
            hvd.synchronize(handle)
        words = str(caught.value)
        assert caught.value.rank == 1 and "rank 1" in words, words
        assert " ".join(what.split()[-4:]) in words, (what, words)


@ranks(3, dies=[1])
def test_a_third_ranks_death_ends_a_pending_message_too() -> None:
    """The runtime is broken for everybody: whoever waits learns it, and from which rank."""
    if hvd.rank() == 1:
        hvd.recv(None, 0)
        hvd.recv(None, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.isend(torch.ones(1), 1)
    with pytest.raises(hvd.PeerLost) as caught:
        hvd.recv(None, 2 - hvd.rank())
    assert caught.value.rank == 1
