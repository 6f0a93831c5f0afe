"""Dtypes without arithmetic in the core, in NumPy: all that moves data takes them, bit for bit, and nothing else does."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from world import ranks

import horoclone as hvd
from horoclone import ops

MOVED = [
    np.dtype(getattr(ml_dtypes, name, name))
    for name in ops.MOVED
    if hasattr(ml_dtypes, name) or hasattr(np, name)
]


def bits(rank, rows, dtype, columns=3):
    """Any bits, NaNs included; the same for the same arguments."""
    chance = np.random.default_rng([rank, rows])
    return np.frombuffer(chance.bytes(rows * columns * dtype.itemsize), dtype).reshape(rows, columns).copy()


def same(found, *parts):
    assert found.dtype == parts[0].dtype and found.shape[1:] == parts[0].shape[1:], found.dtype
    assert found.tobytes() == b"".join(part.tobytes() for part in parts), found.dtype


def test_the_list_has_what_numpy_and_ml_dtypes_have():
    names = {dtype.name for dtype in MOVED}
    assert {"uint32", "uint64", "complex64", "complex128"} <= names
    assert {name for name in dir(ml_dtypes) if name.startswith("float8")} <= names


@ranks(2)
def test_every_operation_that_moves_data():
    me = hvd.rank()
    for tag, dtype in enumerate(MOVED):
        both = [bits(rank, 2 + 3 * rank, dtype) for rank in (0, 1)]
        mine, root, whole = both[me], bits(1, 5, dtype), bits(7, 5, dtype)
        for result in (hvd.allgather(mine), hvd.synchronize(hvd.allgather_async(mine))):
            same(result, *both)
        same(hvd.grouped_allgather([mine, mine[:1]])[0], *both)
        found, counts = hvd.alltoall(mine, np.array([1, 1 + 3 * me]))
        same(found, both[0][1:] if me else both[0][:1], both[1][1:] if me else both[1][:1])
        assert counts.tolist() == ([1, 4] if me else [1, 1])
        same(hvd.broadcast(bits(me, 5, dtype), 1), root)
        place = bits(me, 5, dtype)
        assert hvd.broadcast_(place, 1) is place
        same(place, root)
        same(hvd.synchronize(hvd.broadcast_async(bits(me, 5, dtype), 1)), root)
        found = hvd.gather(mine, 1)
        assert me or found is None
        if me:
            same(found, *both)
        same(hvd.scatter(whole if me else None, 1), whole[3:] if me else whole[:3])
        same(hvd.scatter(whole if me else None, 1, [4, 1]), whole[4:] if me else whole[:4])
        for rows in (5, 70_000):
            sent = bits(9, rows, dtype)
            if me:
                hvd.send(sent, 0, tag)
                hvd.send(sent, 0, tag)
            else:
                same(hvd.recv(None, 1, tag), sent)
                place = bits(0, rows, dtype)
                assert hvd.recv(place, 1, tag) is place
                same(place, sent)
            same(hvd.broadcast(bits(me, rows, dtype), 0), bits(0, rows, dtype))
    # Neither contiguous nor in this machine's byte order
    turned = np.arange(12, dtype=">c8").reshape(3, 4).T + me
    assert np.array_equal(hvd.broadcast(turned, 1), turned + 1 - me)
