"""Data between ranks through the real libfabric, over its provider tcp. That over shm, and the channel itself, is in
csrc/tests/net/test_fabric.cc."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

import horoclone as hvd  # noqa: E402
from horoclone.runtime import native  # noqa: E402

BY_FABRIC = {"HOROCLONE_SHARED_MEMORY": "0", "HOROCLONE_FABRIC": "tcp"}


@pytest.fixture
def libfabric():
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError as error:
        pytest.skip(f"{error} (Debian: apt-get install libfabric1)")


def check_operations():
    rank, size = hvd.rank(), hvd.size()
    for count in (1, 1023, 1 << 20):
        for dtype in ("float32", "int64", "uint8"):
            mine = (np.arange(count) % 11 + rank).astype(dtype)
            whole = np.asarray(hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{count}.{dtype}"))
            np.testing.assert_array_equal(
                whole, sum((np.arange(count) % 11 + r).astype(dtype) for r in range(size))
            )
    rows = hvd.allgather(np.full((rank + 1, 300), rank, np.float32), name="rows")
    assert [int(r) for r in rows[:, 0]] == [r for r in range(size) for _ in range(r + 1)]
    last = hvd.broadcast(np.full(300_000, rank, np.float64), size - 1, name="last")
    assert (last == size - 1).all()
    for dtype in ("float32", "int32"):
        sent = np.repeat(np.arange(size), 20_000).astype(dtype) + 10 * rank
        received = np.asarray(hvd.alltoall(sent, name=f"all.{dtype}"))
        np.testing.assert_array_equal(received, np.repeat(10 * np.arange(size), 20_000).astype(dtype) + rank)
    handles = [
        hvd.allreduce_async(np.full(3000, i, np.float32), op=hvd.Sum, name=f"many.{i}") for i in range(40)
    ]
    assert all((hvd.synchronize(handle) == size * i).all() for i, handle in enumerate(handles))


def use_it_for_two_lives():
    for _ in range(2):
        check_operations()
        with pytest.raises(hvd.HorovodInternalError, match="different"):
            hvd.allreduce(np.ones(3 + hvd.rank(), np.float32), name="different")
        check_operations()
        assert json.loads(native().counters())["between_nodes"] == "libfabric"
        hvd.shutdown()
        hvd.init()


def test_libfabric_moves_the_data_of_every_operation(libfabric, worlds):
    worlds.run(3, use_it_for_two_lives, env=BY_FABRIC)


def reduce_until_one_dies():
    check_operations()
    if hvd.rank() == 2:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(hvd.PeerLost) as lost:
        while True:
            hvd.allreduce(np.ones(1 << 20, np.float32), name="big")
    assert lost.value.rank == 2


def test_a_rank_that_is_killed_is_lost_to_the_others(libfabric, worlds):
    worlds.run(3, reduce_until_one_dies, dies=[2], env=BY_FABRIC)


def be_refused(*words):
    with pytest.raises(hvd.HorovodInternalError) as refused:
        hvd.init()
    for word in ("HOROCLONE_FABRIC=pigeon: rank 0 (", *words):
        assert word in str(refused.value)


def test_a_provider_that_is_not_there_is_named_by_every_rank(libfabric, worlds):
    env = {**BY_FABRIC, "HOROCLONE_FABRIC": "pigeon"}
    worlds.run(2, be_refused, env=env, init=False)


HANDLES = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
import horoclone as hvd
hvd.init()
os.kill(os.getpid(), signal.SIGTERM)
hvd.shutdown()
"""


def test_the_process_keeps_its_signal_handlers(libfabric, launch):
    assert launch([sys.executable, "-c", HANDLES], env=BY_FABRIC).stdout.strip() == "handled"


WITHOUT = """
import os
import horoclone as hvd
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    os.write(1, f"\\nrefused: {error}\\n".encode())
"""


def test_without_the_library_every_rank_says_what_to_install(launch, tmp_path):
    (tmp_path / "libfabric.so.1").write_text("no library")
    env = {**BY_FABRIC, "LD_LIBRARY_PATH": str(tmp_path)}
    done = launch(
        [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, "-c", WITHOUT], env=env
    )
    said = [line for line in done.stdout.splitlines() if "refused: " in line]
    assert len(said) == 2 and all(
        "libfabric.so.1" in line and "Debian: libfabric1" in line for line in said
    ), done.output
