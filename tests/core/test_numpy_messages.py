"""send, recv, isend and irecv of NumPy arrays; the rest is the core's: csrc/tests/engine/test_messages.cc."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from world import ranks, until

import horoclone as hvd
from horoclone import ops

DTYPES = [np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name) for name in ops.DTYPES]


@ranks(3)
def test_everybody_sends_to_everybody_and_to_itself():
    messages = [np.full(20_000, 10 * hvd.rank() + to, np.float32) for to in range(hvd.size())]
    sent = [hvd.isend(message, to, tag=7) for to, message in enumerate(messages)]
    places = [np.zeros(20_000, np.float32) for _ in messages]
    received = [hvd.irecv(place, src, tag=7) for src, place in enumerate(places)]
    for src, handle in enumerate(received):
        assert hvd.synchronize(handle) is places[src]
        assert (places[src] == 10 * src + hvd.rank()).all()
    for handle in sent:
        assert hvd.synchronize(handle) is None
    hvd.send(np.arange(3), hvd.rank())
    assert hvd.recv(src=hvd.rank()).tolist() == [0, 1, 2]


@ranks(3)
def test_whoever_sends_first_is_received():
    if hvd.rank() == 0:
        assert sorted(hvd.recv(tag=2).item() for _ in range(2)) == [1, 2]
    else:
        hvd.send(np.array(hvd.rank()), 0, tag=2)


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_messages_of_a_process_set_are_its_own():
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() == 0:
        of_all, of_pair = hvd.isend([1], 2), hvd.isend([2], 2, process_set=pair)
        hvd.synchronize(of_pair)
        hvd.synchronize(of_all)
    elif hvd.rank() == 2:
        assert hvd.synchronize(hvd.irecv(process_set=pair)).tolist() == [2]
        assert hvd.recv(src=0).tolist() == [1]
    refused = "the provided process set" if hvd.rank() == 1 else f"process set {pair.process_set_id}"
    for call in (lambda: hvd.send([1], 1, process_set=pair), lambda: hvd.recv(src=1, process_set=pair)):
        with pytest.raises(ValueError, match=rf"ank 1 is not a member of {refused}"):
            call()
    hvd.remove_process_set(pair)


@ranks(2)
def test_handles_are_polled_and_collectives_are_not_held_up():
    if hvd.rank() == 0:
        handle = hvd.irecv(None, 1, tag=1)
        assert not hvd.poll(handle)
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
        assert not hvd.poll(handle), "nothing was sent yet"
        hvd.barrier()
        until(lambda: hvd.poll(handle))
        assert hvd.synchronize(handle).tolist() == [4]
    else:
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
        hvd.barrier()
        hvd.send([4], 0, tag=1)


@ranks(2)
def test_arrays_that_cannot_be_filled_or_sent_are_refused():
    one = np.ones(4)
    for call, text in (
        (lambda: hvd.recv(one[::2], 1), "contiguous"),
        (lambda: hvd.recv([0.0], 1), "NumPy array"),
        (lambda: hvd.send(np.ones(2, np.longdouble), 1), "float128 is not supported"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            call()
