"""Arithmetic on tensors that only claim to be on a GPU (torch's FakeTensorMode): devices that must not mix, values that
the host must not read. No GPU and no value takes part; autograd would want a torch with CUDA, so it is left out.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from horoclone.ops import ALLTOALL, Average, Sum
from horoclone.torch import Compression, operations, sync_batch_norm
from horoclone.torch.operations import functional, gpu

GPU = torch.device("cuda", 0)


@pytest.fixture
def claims(monkeypatch) -> Iterator[None]:
    """Within it tensors have shapes, dtypes and devices only, and what would read a value is an error."""
    # It may go from one device to another
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self)
    with FakeTensorMode(), torch.no_grad():
        yield


class Bucket:
    """What a GradientCompressor sees; every rank sends the same."""

    def __init__(self) -> None:
        self.gradients = [torch.randn(64, 48, device=GPU), torch.randn(7, device=GPU)]
        self.flat = torch.cat([g.flatten() for g in self.gradients])
        self.names, self.state, self.size, self.rank, self.divisor = ["matrix", "vector"], {}, 2, 0, 2

    def allreduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        return tensor


def test_low_rank_compression_stays_on_the_gpu_and_reads_no_value(claims) -> None:
    compressor = Compression.powersgd(rank=2, start_step=0)
    bucket = Bucket()
    for _ in range(2):
        work = compressor.reduce(bucket)
        wire = next(work)
        while wire is not None:
            assert wire.device == GPU
            try:
                wire = work.send(wire)
            except StopIteration:
                wire = None
    kept = [value for value in bucket.state.values() if isinstance(value, torch.Tensor)]
    assert kept and all(value.device == GPU for value in kept)


def test_batch_normalisation_copies_nothing_from_the_host(monkeypatch) -> None:
    """On a GPU such a copy would let the host wait for the stream."""
    monkeypatch.setattr(operations, "allgather", lambda tensor, process_set: torch.cat([tensor, tensor]))
    monkeypatch.setattr(torch.Tensor, "new_tensor", lambda *arguments: pytest.fail("copies from the host"))
    count, mean, squares = sync_batch_norm._combined(3, torch.ones(2), torch.full((2,), 6.0), None)
    assert (count.item(), mean.tolist(), squares.tolist()) == (6.0, [1.0, 1.0], [12.0, 12.0])


def test_compiled_code_expects_results_where_they_will_be(claims, monkeypatch) -> None:
    monkeypatch.setattr(functional, "_ranks_of", lambda set_number: [0, 1])
    options = (None, Sum, 1.0, 1.0, 0, 0, None)
    rows, counts = functional._fake_wait("alltoall", [torch.ones(4, 2, device=GPU)], options)
    assert functional.KINDS["alltoall"] == ALLTOALL
    assert rows.device == GPU and counts.device.type == "cpu", "the counts are told in host memory"
    (reduced,) = functional._fake_wait(
        "allreduce", [torch.ones(4, device=GPU)], (None, Average, *options[2:])
    )
    assert reduced.device == GPU and functional._fake_start([reduced]).device.type == "cpu"


def test_memory_used_on_the_default_stream_is_marked_for_it_and_not_for_one_of_torchs_pool(
    monkeypatch,
) -> None:
    """The default stream's number is 0, for which torch.cuda.ExternalStream silently takes a stream of its pool."""

    def external(number: int, device: int) -> str:
        return f"external {number} on {device}" if number else "some stream of the pool"

    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default on {device}")
    marked: list[str] = []
    tensor = types.SimpleNamespace(record_stream=marked.append)
    gpu.also_used_at((1, 0), [tensor])
    gpu.also_used_at((1, 1 << 40), [tensor])
    gpu.also_used_at(gpu.HOST, [tensor])
    assert marked == ["default on 1", f"external {1 << 40} on 1"]


def test_where_torch_does_not_take_memory_of_nccls_buckets_lie_in_its_own(monkeypatch, caplog) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise ValueError("the pointer resides on host memory")

    monkeypatch.setattr(gpu, "place_of", lambda tensor: (0, 0))
    monkeypatch.setattr(torch, "as_tensor", refused)
    runtime: Any = types.SimpleNamespace(allocate_on_device=lambda device, size: object())
    assert gpu.registered_memory(runtime, torch.zeros(1), 10, torch.float32) is None
    assert "the pointer resides on host memory" in caplog.text


def test_where_torch_has_no_memory_left_the_core_gives_back_what_it_keeps(monkeypatch, request) -> None:
    observers: list[Any] = []
    trimmed: list[None] = []
    runtime = types.SimpleNamespace(stream_wait=lambda *_: None, trim_memory=lambda: trimmed.append(None))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(gpu, "_stream_now", lambda device: 7)
    monkeypatch.setattr(gpu, "native", lambda: runtime)
    initialized = [True]
    monkeypatch.setattr(gpu, "is_initialized", lambda: initialized[0])
    request.addfinalizer(gpu._watch_allocator.cache_clear)
    gpu._watch_allocator.cache_clear()
    gpu.follow(runtime, 1, gpu.HOST)
    assert not observers  # attaching starts CUDA
    for _ in range(2):
        gpu.follow(runtime, 1, (0, 7))
    (on_out_of_memory,) = observers
    on_out_of_memory(0, 1 << 30, 1 << 33, 1 << 20)
    initialized[0] = False
    on_out_of_memory(0, 1 << 30, 1 << 33, 1 << 20)
    assert len(trimmed) == 1

    def refuses(_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuses)
    gpu._watch_allocator.cache_clear()
    gpu.follow(runtime, 1, (0, 7))


def test_a_join_comes_behind_the_current_stream(monkeypatch) -> None:
    uses_cuda = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_cuda[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(gpu, "_stream_now", lambda device: 70 + device)
    assert gpu.place_to_join(-1) == (1, 71)
    assert gpu.place_to_join(0) == (0, 70)
    uses_cuda[0] = False
    assert gpu.place_to_join(-1) == gpu.HOST
    assert gpu.place_to_join(0) == (0, 0)
