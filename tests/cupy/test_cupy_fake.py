"""horoclone.cupy on fakes of CUDA and NCCL and on a stand-in for CuPy: no GPU and no CuPy take part.

The stand-in has the few names of CuPy that the binding uses; its arrays lie in the memory of CUDA's fake, whose
streams are threads with delays, so whoever reads too early reads old values. As in the original a new array lies on
the GPU that is current, which need not be that of any other array. The last test wants CuPy and real GPUs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import ran

from horoclone import ops

ml_dtypes = pytest.importorskip("ml_dtypes")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cupy_regression.py"


class StandIn(types.ModuleType):
    """Becomes sys.modules["cupy"] of a rank."""

    def __init__(self, device: int) -> None:
        super().__init__("cupy")
        driver = self.driver = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert driver.cuCtxPushCurrent_v2(context) == 0
        assert driver.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        standin = self
        current = [device]

        class Device:
            def __init__(self, number: int | None = None) -> None:
                self.id = current[-1] if number is None else number

            def use(self) -> None:
                current[-1] = self.id

            def __enter__(self) -> None:
                current.append(self.id)

            def __exit__(self, *_: object) -> None:
                current.pop()

        class ndarray:
            def __init__(self, shape: Any, dtype: Any) -> None:
                self.host = standin.memory(shape, np.dtype(dtype))
                self.shape, self.dtype, self.ndim = self.host.shape, self.host.dtype, self.host.ndim
                self.nbytes, self.flags = self.host.nbytes, self.host.flags
                self.data = types.SimpleNamespace(ptr=self.host.ctypes.data if self.host.size else 0)
                self.device = Device()

            __cuda_array_interface__ = {"version": 3}  # that it has one is what is looked at

            def __array__(self, *_: Any, **__: Any) -> Any:
                raise TypeError("Implicit conversion to a NumPy array is not allowed.")  # as CuPy

            def reshape(self, shape: Any) -> Any:
                assert tuple(shape) == self.shape
                return self

            def get(self) -> np.ndarray:
                assert driver.cuStreamSynchronize(stream) == 0
                return self.host.copy()

            # Arithmetic, for an example: each result is a new array.
            def __matmul__(self, other: Any) -> Any:
                return standin.array(self.get() @ other.get())

            def __sub__(self, other: Any) -> Any:
                return standin.array(self.get() - other.get())

            def __truediv__(self, number: float) -> Any:
                return standin.array(self.get() / number)

            def __rmul__(self, number: float) -> Any:
                return standin.array(number * self.get())

            @property
            def T(self) -> Any:
                return standin.array(self.get().T.copy())

            def max(self) -> float:
                return float(self.get().max())

        self.ndarray, self.asarray = ndarray, self.array
        self.abs = lambda array: self.array(np.abs(array.get()))
        self.cuda = types.SimpleNamespace(
            get_current_stream=lambda device: types.SimpleNamespace(ptr=stream.value),
            Device=Device,
            runtime=types.SimpleNamespace(getDeviceCount=lambda: 4),
        )
        self.empty = ndarray
        self.empty_like = lambda like: ndarray(like.shape, like.dtype)
        self.ascontiguousarray = lambda array: (
            array if array.flags.c_contiguous else standin.array(array.get())
        )
        self.from_dlpack = lambda foreign: foreign.owner

    def memory(self, shape: Any, dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        pointer = ctypes.c_uint64()
        assert self.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(1, size))) == 0
        raw = (ctypes.c_char * max(1, size)).from_address(pointer.value)
        return np.frombuffer(raw, np.uint8, size).view(dtype).reshape(shape)

    def array(self, values: Any) -> Any:
        values = np.asarray(values)
        made = self.ndarray(values.shape, values.dtype)
        made.host[...] = values
        return made


def begin() -> tuple[Any, Any]:
    import horoclone

    horoclone.init()
    cupy = sys.modules["cupy"] = StandIn(horoclone.local_rank())
    import horoclone.cupy as hvd

    return cupy, hvd


def some(dtype: np.dtype, rank: int) -> np.ndarray:
    return ((np.arange(12).reshape(3, 4) * 7 + rank * 3) % 5).astype(dtype)


def operations() -> None:
    cupy, hvd = begin()
    rank, size = hvd.rank(), hvd.size()
    for dtype in (ml_dtypes.bfloat16 if name == "bfloat16" else name for name in ops.DTYPES):
        dtype = np.dtype(dtype)
        ours = [some(dtype, r) for r in range(size)]
        wide = np.stack([one.astype(np.float64) for one in ours])
        source = cupy.array(ours[rank])
        largest = hvd.allreduce(source, op=hvd.Max)
        assert isinstance(largest, cupy.ndarray) and largest.dtype == dtype and largest is not source
        np.testing.assert_array_equal(largest.get().astype(np.float64), wide.max(0))
        if dtype != np.bool_:
            target = cupy.array(ours[rank])
            assert hvd.allreduce_(target) is target
            mean = np.trunc(wide.mean(0)) if dtype.kind in "iu" else wide.mean(0)
            np.testing.assert_allclose(target.get().astype(np.float64), mean, rtol=1e-2)
        rows = hvd.allgather(cupy.array(ours[rank][: rank + 1]), f"rows of {dtype}")
        np.testing.assert_array_equal(rows.get(), np.concatenate([ours[r][: r + 1] for r in range(size)]))
        handle = hvd.broadcast_async(cupy.array(ours[rank]), 1)
        np.testing.assert_array_equal(hvd.synchronize(handle).get(), ours[1])
        sent, received = hvd.alltoall(cupy.array(ours[rank]), [1, 2])
        np.testing.assert_array_equal(
            sent.get(), np.concatenate([o[:1] if rank == 0 else o[1:] for o in ours])
        )
        assert received == [1 + rank] * 2
    share = hvd.reducescatter(cupy.array(some(np.dtype("f4"), rank)), op=hvd.Sum)
    total = some(np.dtype("f4"), 0) + some(np.dtype("f4"), 1)
    np.testing.assert_array_equal(share.get(), total[:2] if rank == 0 else total[2:])
    group = hvd.grouped_allreduce([cupy.array(np.full(n, rank + 1.0)) for n in (1, 70_000)], op=hvd.Sum)
    assert [float(one.get()[-1]) for one in group] == [3.0, 3.0] and hvd.grouped_allreduce([]) == []
    groups_and_empty_arrays(cupy, hvd)
    hvd.broadcast_(scalar := cupy.array(np.float32(rank)), 1)
    assert scalar.get() == 1.0 and scalar.shape == ()
    # What speaks DLPack is reduced where it lies, and given back.
    foreign = types.SimpleNamespace(owner=cupy.array(np.ones(3)))
    assert hvd.allreduce_(foreign, op=hvd.Sum) is foreign and foreign.owner.get().tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="complex64 is not supported"):
        hvd.allreduce(cupy.array(np.ones(2, np.complex64)))
    with pytest.raises(ValueError, match="ndarray is not an array on a GPU.*import horoclone as hvd"):
        hvd.allreduce(np.ones(3))
    import horoclone

    # Whoever takes NumPy's functions for CuPy's arrays is told where theirs are.
    for call in (horoclone.allreduce, horoclone.allreduce_):
        with pytest.raises(ValueError, match="memory of a GPU.*horoclone.cupy"):
            call(foreign.owner)
    with pytest.raises(hvd.Mismatch, match="GPU"):
        mixed = cupy.array(np.ones(3)) if rank == 0 else np.ones(3)
        (hvd if rank == 0 else horoclone).allreduce(mixed, name="mixed")
    rooted_and_messages(cupy, hvd)
    on_any_cupy(cupy, hvd)
    while_another_gpu_is_current(cupy, hvd)
    if rank == 1:
        assert hvd.allreduce(cupy.array(np.ones(2)), op=hvd.Sum, name="alone").get().tolist() == [1.0, 1.0]
    assert hvd.join() == 1


def groups_and_empty_arrays(cupy: Any, hvd: Any) -> None:
    rank = hvd.rank()
    parts = [cupy.array(np.full((n, 2), rank, np.int32)) for n in (rank, 3 - rank)]
    first, second = hvd.grouped_allgather(parts)
    assert first.get().tolist() == [[1, 1]] and second.get().tolist() == [[0, 0]] * 3 + [[1, 1]] * 2
    pair = [cupy.array(np.arange(3.0) + rank), cupy.array(np.full((4, 2), rank + 1, np.int16))]
    first, second = hvd.grouped_reducescatter(pair, op=hvd.Sum)
    assert first.get().tolist() == ([1.0, 3.0] if rank == 0 else [5.0]) and second.dtype == np.int16
    assert second.get().tolist() == [[3, 3]] * 2 and hvd.grouped_allgather([]) == []
    with pytest.raises(ValueError, match="0-d"):
        hvd.grouped_reducescatter([cupy.array(np.float32(1))])
    empty = cupy.array(np.empty((0, 3), np.float32))
    assert hvd.allreduce(empty).shape == hvd.broadcast(empty, 0).shape == (0, 3)
    assert hvd.allreduce_(empty) is empty and hvd.allgather(empty).shape == (0, 3)
    hvd.barrier()


def rooted_and_messages(cupy: Any, hvd: Any) -> None:
    rank = hvd.rank()
    total = hvd.reduce(cupy.array(np.full(3, rank + 1.0)), 1, op=hvd.Sum)
    assert (total is None) == (rank == 0) and (rank == 0 or total.get().tolist() == [3.0] * 3)
    least = cupy.array(np.full(3, rank + 1.0))
    assert hvd.synchronize(hvd.reduce_async_(least, 0, op=hvd.Max)) is least
    assert least.get().tolist() == [2.0] * 3
    rows = hvd.gather(cupy.array(np.full((rank + 1, 2), rank, np.int16)), 0)
    assert (rows is None) == (rank == 1)
    if rank == 0:
        assert rows.dtype == np.int16 and rows.get().tolist() == [[0, 0], [1, 1], [1, 1]]
    share = hvd.scatter(cupy.array(np.arange(8.0).reshape(4, 2)) if rank == 1 else None, 1, [3, 1])
    assert share.get().tolist() == ([[0, 1], [2, 3], [4, 5]] if rank == 0 else [[6, 7]])
    place = cupy.array(np.zeros(5000, np.int64))
    sent, got = hvd.isend(cupy.array(np.arange(5000) + rank), 1 - rank), hvd.irecv(place, 1 - rank)
    assert hvd.synchronize(got) is place and hvd.synchronize(sent) is None
    np.testing.assert_array_equal(place.get(), np.arange(5000) + 1 - rank)
    foreign = types.SimpleNamespace(owner=cupy.array(np.zeros(3, np.float32)))
    if rank == 0:
        hvd.send(cupy.array(np.ones((2, 3), np.float16)), 1, tag=4)
        assert hvd.recv(foreign, 1, tag=5) is foreign and foreign.owner.get().tolist() == [2.0] * 3
    else:
        came = hvd.recv(tag=4)
        assert came.shape == (2, 3) and came.dtype == np.float16 and came.get().sum() == 6
        hvd.send(types.SimpleNamespace(owner=cupy.array(np.full(3, 2.0, np.float32))), 0, tag=5)


def while_another_gpu_is_current(cupy: Any, hvd: Any) -> None:
    """What a rank gets lies beside what it gave, and on the GPU that it works on."""
    rank = hvd.rank()
    home = cupy.cuda.Device().id
    ours, column = cupy.array(np.arange(4.0)), cupy.array(np.arange(6.0).reshape(2, 3))
    column.host = column.host.T
    column.shape, column.flags = column.host.shape, column.host.flags
    with cupy.cuda.Device(home + 2):
        assert cupy.array(np.zeros(1)).device.id == home + 2
        sent = hvd.isend(ours, 1 - rank, tag=9)
        made = [
            hvd.allreduce(ours, op=hvd.Sum), hvd.allreduce(column, op=hvd.Sum), hvd.allgather(ours),
            hvd.broadcast(ours, 0), hvd.reducescatter(ours), hvd.alltoall(ours, [2, 2])[0],
            *hvd.grouped_allreduce([ours, ours]),
        ]  # fmt: skip
        came = hvd.recv(src=1 - rank, tag=9)
        hvd.synchronize(sent)
    assert {one.device.id for one in [*made, came]} == {home}
    np.testing.assert_array_equal(made[1].get(), 2 * np.arange(6.0).reshape(2, 3).T)


def on_any_cupy(cupy: Any, hvd: Any) -> None:
    """With CuPy's own names only, so that it runs on the stand-in and on CuPy."""
    rank, both = hvd.rank(), [np.arange(5000.0) + r for r in range(2)]

    def mine(values: Any) -> Any:
        return cupy.asarray(np.asarray(values))

    for dtype in ("uint8", "int32", "int64", "float16", "float32", "float64"):
        ours = [(one % 7).astype(dtype) for one in both]
        np.testing.assert_array_equal(hvd.allreduce(mine(ours[rank]), op=hvd.Sum).get(), ours[0] + ours[1])
        np.testing.assert_array_equal(
            hvd.allgather(mine(ours[rank][: rank + 1])).get(), [ours[0][0], *ours[1][:2]]
        )
        np.testing.assert_array_equal(hvd.broadcast(mine(ours[rank]), 1).get(), ours[1])
    target = mine(both[rank])
    assert hvd.allreduce_(target) is target
    np.testing.assert_array_equal(target.get(), np.arange(5000.0) + 0.5)
    share = hvd.reducescatter(mine(both[rank]), op=hvd.Sum)
    np.testing.assert_array_equal(share.get(), (both[0] + both[1])[2500 * rank :][:2500])
    rows, counts = hvd.alltoall(mine(both[rank][:3]), [1, 2])
    assert counts == [1 + rank] * 2 and rows.get().tolist() == ([0.0, 1.0] if rank == 0 else [1, 2, 2, 3])
    first, second = hvd.grouped_allgather([mine([rank]), mine([[rank] * 2])])
    assert first.get().tolist() == [0, 1] and second.get().tolist() == [[0, 0], [1, 1]]
    sent, came = hvd.isend(mine(both[rank]), 1 - rank), hvd.recv(src=1 - rank)
    np.testing.assert_array_equal(came.get(), both[1 - rank])
    hvd.synchronize(sent)
    assert hvd.allreduce(mine(np.float32(rank)), op=hvd.Max).shape == ()
    assert hvd.allreduce(mine(np.empty((0, 3)))).shape == (0, 3)


def on_real_gpus() -> None:
    import cupy

    import horoclone.cupy as hvd

    hvd.init()
    cupy.cuda.Device(hvd.local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    on_any_cupy(cupy, hvd)
    with cupy.cuda.Stream(non_blocking=True):  # what it still has to write is waited for, by streams
        on_any_cupy(cupy, hvd)
        late = cupy.arange(1 << 22, dtype=cupy.float64)
        for _ in range(20):
            late = cupy.sqrt(late * late)
        hvd.allreduce_(late, op=hvd.Sum)
        assert float((late / 2).sum()) == float(cupy.arange(1 << 22, dtype=cupy.float64).sum())


def regression() -> None:
    import contextlib
    import io
    import runpy

    begin()
    sys.argv = ["cupy_regression.py", "--rows", "500", "--columns", "8", "--steps", "40"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    import horoclone

    if not said.getvalue():
        return
    assert not horoclone.is_initialized()
    errors = [float(word) for word in said.getvalue().split(": ")[1].split(", ")]
    assert said.getvalue().startswith("2 ranks") and len(set(errors)) == 1 and errors[0] < 0.05, (
        said.getvalue()
    )


def test_fake_cupy_arrays_in_every_operation_and_the_example(
    on_fakes: dict[str, str], worker_pool: Any
) -> None:
    for body in (operations, regression):
        team = worker_pool(body, 2, env={**on_fakes, "HC_FAKE_DELAY_US": "100"})
        assert team.wait(60) == [0, 0], team.outputs()


def test_the_example_says_that_it_is_skipped_where_there_is_no_gpu() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = ran(sys.executable, str(EXAMPLE), env=hidden)
    assert done.returncode == 0 and done.stdout.startswith("SKIPPED cupy_regression.py: it needs CuPy"), done


def test_cupy_arrays_on_real_gpus(worker_pool: Any) -> None:
    cupy = pytest.importorskip(
        "cupy", reason="CuPy is not installed: pip install cupy-cuda13x", exc_type=ImportError
    )
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU here: {error}")
    team = worker_pool(on_real_gpus, 2)  # CuPy is imported by the ranks
    assert team.wait(120) == [0, 0], team.outputs()
