"""Torch's features over tensors on GPUs, on the fakes of CUDA and NCCL: no GPU takes part.

Within fake.everywhere() whatever torch allocates lies in the fake's device memory, so also the buffers of DDP and FSDP2.
NCCL is asked for, which makes it an error if something had to pass host memory; test_gpu_features.py has the same for GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import horoclone.torch as hvd
from horoclone.errors import Unsupported

sys.path.insert(0, str(Path(__file__).parent))
import gpu_fake
import test_gpu
import test_gpu_features

HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent


@pytest.fixture(scope="module")
def memory(fakes: Path) -> Path:
    """The allocator of fake_memory.cc, built against the torch that is installed."""
    made = fakes / f"fake_memory-{torch.__version__}.so"
    source = HERE / "fake_memory.cc"
    if made.exists() and made.stat().st_mtime > source.stat().st_mtime:
        return made
    if shutil.which("g++") is None or not (TORCH / "include" / "c10").exists():
        pytest.skip("torch's headers, or a compiler, are not here")
    built = made.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{TORCH / 'include'}"]
    ends = ["-o", str(built), f"-L{TORCH / 'lib'}", "-lc10", "-ldl"]
    subprocess.run(["g++", *flags, str(source), *ends], check=True, timeout=300)
    built.rename(made)
    return made


@pytest.fixture
def ranks(torch_worker_pool: Any, on_fakes: dict[str, str], memory: Path) -> Callable[..., Any]:
    env = {
        **on_fakes,
        "HOROCLONE_GPU_OPERATIONS": "nccl",
        "HC_FAKE_DELAY_US": "50",
        "HC_TEST_FAKE_MEMORY": str(memory),
    }

    def run(body: Callable[..., None], size: int = 2, **arguments: Any) -> None:
        team = torch_worker_pool(body, size, env=env, **arguments)
        assert team.wait(120) == [0] * size, team.outputs()

    return run


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def trained(steps: int = 4, **options: Any) -> list[torch.Tensor]:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    for step in range(steps):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compressed() -> None:
    """int8 has the host's bits; PowerSGD its numbers. Both on the GPU, and the same on every rank."""
    fake = gpu_fake.begin()
    for compression, apart in (
        (hvd.Compression.int8, 0.0),
        (hvd.Compression.int8(block=16, error_feedback=False), 0.0),
        (hvd.Compression.powersgd(rank=2, start_step=0), 1e-6),
        (hvd.Compression.topk(ratio=0.5), 1e-6),
        (hvd.Compression.bf16, 1e-6),
    ):
        on_host = trained(compression=compression)
        placed = fake.placed
        with fake.everywhere():
            on_gpu = trained(compression=compression)
            assert fake.placed > placed, "nothing was seen on the GPU"
            both = hvd.allgather(torch.cat([one.flatten() for one in on_gpu]).unsqueeze(0))
            assert torch.equal(both[0], both[1]), compression
        for ours, expected in zip(on_gpu, on_host, strict=True):
            torch.testing.assert_close(ours, expected, rtol=apart, atol=apart)
    assert fake.cuda.hc_fake_count(b"pinned", 0) == 0, "nothing went through host memory"


def test_fake_compressors_work_on_the_gpu(ranks: Callable[..., Any]) -> None:
    ranks(compressed)


def weighs() -> None:
    """Gradients and tensors, with the host's numbers; a step in a captured graph is refused."""
    fake, rank = gpu_fake.begin(), hvd.rank()

    def means() -> list[torch.Tensor]:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
        )
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            optimizer.set_weight(1 + 3 * step * rank)
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
        own = torch.full((5,), 1.0 + rank)
        alone = [hvd.allreduce(own.to(t), weight=1 + 2 * rank) for t in (torch.float32, torch.bfloat16)]
        with pytest.raises(ValueError, match="rank 1 gave the weight -1"):
            hvd.allreduce(own, name="x", weight=1 - 2 * rank)
        return [one.detach().float() for one in (*model.parameters(), *alone)]

    on_host, placed = means(), fake.placed
    with fake.everywhere():
        on_gpu = means()
        assert fake.placed > placed, "nothing was seen on the GPU"
        for ours, expected in zip(on_gpu, on_host, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("p", parameter)])
        for _ in range(2):
            optimizer.set_weight(1)
            parameter.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        fake.capturing = True
        try:
            optimizer.set_weight(1)
            with pytest.raises(Unsupported, match="captured CUDA graph"):
                parameter.sum().backward()
        finally:
            fake.capturing = False
        optimizer.step()


def test_fake_weights_on_the_gpu(ranks: Callable[..., Any]) -> None:
    ranks(weighs)


NEEDS_A_GPU = {"test_a_captured_step_trains_as_an_uncaptured_one"}
# The fake does not see where a tensor without elements is, has no streams of torch, and these ask it for them, or for
# nothing: a wrong spelling or number is found all the same. test_gpu_fake.py has what they try.
IN_HOST_MEMORY = {
    "test_every_operation_and_dtype",
    "test_what_one_rank_gets_messages_groups_and_join",
    "test_torch_distributed_on_cuda_tensors",
    "test_blocks_of_integers_have_the_bits_that_they_have_on_the_host",
}
SLOW = {"test_every_operation_and_dtype"}
BODIES = [
    pytest.param(module.__name__, name, size, marks=[pytest.mark.in_turn] if name in SLOW else [])
    for module in (test_gpu, test_gpu_features)
    for name, function in vars(module).items()
    if name.startswith("test_") and hasattr(function, "body") and name not in NEEDS_A_GPU
    for mark in function.pytestmark
    if mark.name == "parametrize" and mark.args[0] == "world_size"
    for size in mark.args[1]
]


def as_on_a_gpu(module: str, name: str) -> None:
    """The body of a test for real GPUs; what it asks of torch.cuda has stand-ins that do nothing."""
    from horoclone.torch.c10d import group, sparse, tensors, work

    fake = gpu_fake.begin()
    for each in (group, sparse, tensors, work):
        fake.patch(each)
    stream = mock.MagicMock()
    stand_ins: dict[str, Any] = {
        "device_count": lambda: 1, "synchronize": lambda *_: None, "_sleep": lambda cycles: None,
        "Stream": lambda *_: stream, "current_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for each in (test_gpu, test_gpu_features):
            stack.enter_context(mock.patch.object(each, "device", lambda: torch.device("cpu")))
        for what, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, what, stand_in))
        if name not in IN_HOST_MEMORY:
            stack.enter_context(fake.everywhere())
        getattr(importlib.import_module(module), name).body()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert fake.placed > 0 or name in IN_HOST_MEMORY, "nothing was seen on the GPU"
    assert fake.cuda.hc_fake_count(b"pinned", 0) == 0, "nothing went through host memory"


@pytest.mark.parametrize(("module", "name", "size"), BODIES)
def test_fake_bodies_of_the_tests_for_gpus(
    ranks: Callable[..., Any], module: str, name: str, size: int
) -> None:
    ranks(as_on_a_gpu, size, module=module, name=name)


def drops_a_work() -> None:
    """record_stream: memory of an operation that nobody waits for is torch's again when the stream has come so far."""
    from horoclone.torch.c10d import group, tensors, work

    fake = gpu_fake.begin()
    for module in (group, tensors, work):
        fake.patch(module)
    hvd.shutdown()
    dist.init_process_group("horoclone")
    with fake.everywhere():
        dropped = dist.all_reduce(torch.ones(1000), async_op=True)
        while not dropped.is_completed():
            pass
        del dropped
        assert len(fake.in_use) == 1, fake.in_use
        waited = dist.all_reduce(torch.ones(1000), async_op=True)
        waited.wait()
        del waited
        assert len(fake.in_use) == 1, "its stream comes behind the result"
    dist.destroy_process_group()


def test_fake_memory_of_an_operation_that_nobody_waits_for(ranks: Callable[..., Any]) -> None:
    ranks(drops_a_work)
