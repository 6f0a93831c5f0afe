"""The torch binding's way for tensors on GPUs, on fakes of CUDA and NCCL: no GPU takes part.

gpu_fake.py has what takes the place of torch.cuda.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from worker_pool import say

import horoclone.torch as hvd
from horoclone.errors import HorovodInternalError, Mismatch, PeerLost, Unsupported
from horoclone.runtime import native
from horoclone.torch.operations import gpu

sys.path.insert(0, str(Path(__file__).parent))
from gpu_fake import Fake, begin

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
]  # fmt: skip


@pytest.fixture
def ranks(torch_worker_pool, on_fakes: dict[str, str]):
    """ranks(body, size=2, **env): runs the body on the fakes and expects every rank to end well."""
    env = {**on_fakes, "HC_FAKE_DELAY_US": "100"}

    def run(body, size=2, expect=None, **more):
        team = torch_worker_pool(body, size, env={**env, **more})
        codes = team.wait(60)
        assert codes == (expect or [0] * size), team.outputs()
        return team

    return run


def some(dtype: torch.dtype, rank: int, shape=(3, 4)) -> torch.Tensor:
    values = (torch.arange(12).reshape(shape) * 7 + rank * 3) % 5
    return values.to(dtype)


def hosts_on_one_gpu() -> None:
    hvd.init()
    fake, rank = Fake(0), hvd.rank()
    os.environ["NCCL_HOSTID"] = f"rank {rank}"
    fake.install()
    assert hvd.allreduce(fake.tensor(torch.ones(5)), op=hvd.Sum).tolist() == [2.0] * 5
    assert hvd.metrics()["gpu"][0]["backend"] == "nccl"
    if rank == 0:
        hvd.send(fake.tensor(torch.arange(3.0)), 1)
    else:
        assert hvd.recv(fake.tensor(torch.zeros(3)), 0).tolist() == [0.0, 1.0, 2.0]
    hvd.shutdown()


def test_ranks_on_one_gpu_go_by_nccl_where_each_is_a_host_of_its_own_to_it(ranks) -> None:
    ranks(hosts_on_one_gpu, HOROCLONE_GPU_OPERATIONS="nccl")


def operations() -> None:
    fake, rank, size = begin(), hvd.rank(), hvd.size()
    for dtype in DTYPES:
        ours = [some(dtype, r) for r in range(size)]
        wide = torch.stack([one.to(torch.float64) for one in ours])
        for op, expected in ((hvd.Sum, wide.sum(0)), (hvd.Max, wide.amax(0)), (hvd.Average, wide.mean(0))):
            if dtype is torch.bool:
                if op == hvd.Average:
                    continue
                expected = wide.amax(0)
            elif op == hvd.Average and not dtype.is_floating_point:
                expected = (wide.sum(0) / size).trunc()
            mine = fake.tensor(ours[rank])
            handle = hvd.allreduce_async_(mine, name=f"{dtype}.{op}", op=op)
            assert hvd.synchronize(handle) is mine
            tolerance = 1e-2 if dtype.itemsize < 4 else 1e-6
            torch.testing.assert_close(mine.to(torch.float64), expected, rtol=tolerance, atol=0)
        gathered = hvd.synchronize(hvd.allgather_async(fake.tensor(ours[rank][: rank + 1]), f"g{dtype}"))
        assert fake.place_of(gathered) != gpu.HOST
        assert torch.equal(gathered, torch.cat([ours[r][: r + 1] for r in range(size)]))
        target = fake.tensor(ours[rank])
        hvd.synchronize(hvd.broadcast_async_(target, 1, f"b{dtype}"))
        assert torch.equal(target, ours[1])
        splits = torch.tensor([1, 2], dtype=torch.int32)
        rows, received = hvd.synchronize(hvd.alltoall_async(fake.tensor(ours[rank]), splits, f"a{dtype}"))
        cut = [ours[r][:1] if rank == 0 else ours[r][1:] for r in range(size)]
        assert torch.equal(rows, torch.cat(cut)) and received.tolist() == [1 + rank] * 2
        assert fake.place_of(received) is gpu.HOST, "as the splits"
    rows, received = hvd.alltoall(fake.tensor(ours[rank]), fake.tensor(splits))
    assert torch.equal(rows, torch.cat(cut)) and received.tolist() == [1 + rank] * 2
    assert fake.place_of(received) is not gpu.HOST, "as the splits"
    share = hvd.synchronize(hvd.reducescatter_async(fake.tensor(some(torch.float32, rank)), "rs", hvd.Sum))
    total = some(torch.float32, 0) + some(torch.float32, 1)
    assert torch.equal(share, total[:2] if rank == 0 else total[2:])
    least = hvd.reduce(fake.tensor(mine := some(torch.float32, rank)), 1, hvd.Min)
    both = torch.stack([some(torch.float32, 0), some(torch.float32, 1)])
    assert torch.equal(least, both.amin(0)) if rank == 1 else least.shape == (0,)
    rows = hvd.gather(fake.tensor(mine[: rank + 1]), 0)
    assert torch.equal(rows, torch.cat([both[0][:1], both[1][:2]])) if rank == 0 else rows.shape == (0, 4)
    share = hvd.scatter(fake.tensor(torch.arange(6.0)) if rank == 0 else None, 0)
    assert share.tolist() == [3.0 * rank + i for i in range(3)]
    assert fake.place_of(share) is not gpu.HOST, "where the root's tensor is"
    share = hvd.scatter(torch.arange(3) if rank == 0 else fake.tensor(torch.zeros(1)), 0, splits=[0, 3])
    assert share.tolist() == [0, 1, 2][: 3 * rank] and (fake.place_of(share) is gpu.HOST) == (rank == 0)
    late = fake.late(torch.arange(40_000) + rank)  # written behind what the stream still has to do
    arrived = fake.tensor(torch.zeros(40_000, dtype=torch.int64))
    sent, got = hvd.isend(late, 1 - rank), hvd.irecv(arrived, 1 - rank)
    assert hvd.synchronize(got) is arrived and torch.equal(arrived, torch.arange(40_000) + 1 - rank)
    hvd.synchronize(sent)
    sent = hvd.isend(fake.late(torch.full((2, 3), rank, dtype=torch.int16)), 1 - rank, tag=3)
    came = hvd.recv(src=None, tag=3)
    assert came.tolist() == [[1 - rank] * 3] * 2 and fake.place_of(came) is not gpu.HOST
    hvd.synchronize(sent)
    if rank == 0:
        hvd.send(torch.arange(3), 1)
    else:
        assert fake.place_of(came := hvd.recv()) is gpu.HOST and came.tolist() == [0, 1, 2]
    with pytest.raises(Mismatch, match="Both ends must be on GPUs or both in host memory"):
        if rank == 0:
            hvd.send(fake.tensor(torch.ones(3)), 1)
        else:
            hvd.recv(torch.zeros(3), 0)
    # A blocking call, which has a way of its own, and one that is not on the GPU in between.
    mine = fake.tensor(torch.ones(5))
    hvd.allreduce_(mine, name="blocking", op=hvd.Sum)
    assert mine.tolist() == [2.0] * 5
    apart = hvd.allreduce(mine, op=hvd.Average)
    assert apart.tolist() == [2.0] * 5 and fake.place_of(apart) is not gpu.HOST and apart is not mine
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    hvd.shutdown()
    hvd.init()
    again = hvd.allreduce(fake.tensor(torch.ones(5)), op=hvd.Sum)
    assert again.tolist() == [2.0] * 5 and fake.place_of(again) is not gpu.HOST


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["nccl", "host", "peers", "auto"])
def test_fake_operations_and_dtypes(ranks, way) -> None:
    ranks(operations, HOROCLONE_GPU_OPERATIONS=way)


def test_fake_operations_and_dtypes_by_rccl_on_hip(ranks, on_hip: dict[str, str]) -> None:
    ranks(operations, HOROCLONE_GPU_OPERATIONS="nccl", **on_hip)


def one_gpu() -> None:
    operations()
    fake = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
    launches, pinned = (fake.hc_fake_count(what, 0) for what in (b"launches", b"pinned"))
    assert launches > 50, f"the kernels reduced nothing: {launches} launches"
    assert pinned <= 4, "more than scatter, send and receive went through host memory"


def test_fake_two_ranks_on_one_gpu_map_each_others_memory(ranks) -> None:
    ranks(one_gpu, HC_TEST_ONE_GPU="1")


def says_why_not() -> None:
    begin_on = begin()
    hvd.allreduce_(begin_on.tensor(torch.ones(5)), name="x", op=hvd.Sum)


def test_fake_memory_that_cannot_be_mapped_leaves_host_memory_and_the_reason(ranks) -> None:
    fails = {"HC_FAKE_CUDA_FAIL": "cuIpcOpenMemHandle_v2:1:1"}
    team = ranks(says_why_not, HC_TEST_ONE_GPU="1", **fails)
    assert "cuIpcOpenMemHandle: invalid argument" in "".join(team.outputs()), team.outputs()


def two_versions() -> None:
    fake, rank = begin(), hvd.rank()
    os.environ["HC_FAKE_NCCL_VERSION"] = ("22809", "22705")[rank]
    mine = fake.tensor(torch.ones(5))
    if os.environ.get("HOROCLONE_GPU_OPERATIONS") == "nccl":
        with pytest.raises(Unsupported, match=r"NCCL is 2\.28\.9 on rank 0.* and 2\.27\.5 on rank 1"):
            hvd.allreduce_(mine, name="x", op=hvd.Sum)
    else:
        hvd.allreduce_(mine, name="x", op=hvd.Sum)
        assert mine.tolist() == [2.0] * 5
    assert hvd.allreduce(torch.ones(3), name="host", op=hvd.Sum).tolist() == [2.0] * 3


@pytest.mark.parametrize("way", ["auto", "nccl"])
def test_fake_another_version_of_nccl_on_one_rank_is_named(ranks, way) -> None:
    team = ranks(two_versions, HOROCLONE_GPU_OPERATIONS=way, HOROCLONE_GPU_KERNELS="off")
    if way == "auto":
        assert "NCCL is 2.28.9 on rank 0" in "".join(team.outputs()), team.outputs()


def groups() -> None:
    fake, rank = begin(), hvd.rank()
    ours = [fake.tensor(torch.full((n,), float(rank + 1))) for n in (3, 50_000, 7, 9)]
    hvd.synchronize(hvd.grouped_allreduce_async_(ours, name="g", op=hvd.Sum))
    assert all(torch.equal(one, torch.full_like(one, 3.0)) for one in ours)
    parts = hvd.synchronize(hvd.grouped_allgather_async([one[: rank + 1] for one in ours], "gg"))
    assert [part.tolist() for part in parts] == [[3.0] * 3] * 4
    with pytest.raises(ValueError, match="different devices"):
        hvd.grouped_allreduce_async([ours[0], torch.ones(3)], name="mixed")
    halves = hvd.synchronize(hvd.grouped_reducescatter_async(ours[:1], "gr", hvd.Average))
    assert halves[0].tolist() == [3.0] * (2 if rank == 0 else 1)
    # The same name on a GPU here, in host memory there: both are told, and go on.
    tensor = ours[0] if rank == 0 else torch.ones(3)
    with pytest.raises(Mismatch, match=r"'w'.*rank") as caught:
        hvd.synchronize(hvd.allreduce_async_(tensor, name="w", op=hvd.Sum))
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value) and "GPU" in str(caught.value)
    subset = hvd.add_process_set([1])
    if rank == 1:
        hvd.synchronize(hvd.allreduce_async_(ours[0], name="own", op=hvd.Sum, process_set=subset))
        assert ours[0].tolist() == [3.0] * 3
    hvd.remove_process_set(subset)


def test_fake_groups_mixed_places_and_process_sets(ranks) -> None:
    ranks(groups, HOROVOD_DYNAMIC_PROCESS_SETS="1")


def placed(fake: Fake, model: torch.nn.Module) -> torch.nn.Module:
    """Its parameters lie on the GPU from now on."""
    for parameter in model.parameters():
        parameter.data = fake.tensor(parameter.data)
    return model


def trained(fake: Fake | None, steps: int = 4, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    if fake is not None:
        placed(fake, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **options
    )
    for step in range(steps):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    if fake is not None and options.get("op") != hvd.Adasum:  # which has no buckets of gradients
        places = [fake.place_of(bucket.flat) for bucket in optimizer._reducer.buckets]
        assert places and gpu.HOST not in places, "buckets lie on the GPU"
        if not options.get("compression"):
            assert all(fake.place_of(p.grad) != gpu.HOST for p in model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]


def optimizes() -> None:
    fake = begin()
    persistent = lambda: json.loads(native().counters())["persistent"]  # noqa: E731
    for options in ({}, {"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}):
        before = persistent()
        on_gpu = trained(fake, **options)
        assert persistent() == before + 3, "one bucket, four steps, the first of which learns"
        on_host = trained(None, **options)
        for a, b in zip(on_gpu, on_host, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_fake_the_optimizers_buckets_lie_on_the_gpu_and_give_the_same_steps(ranks) -> None:
    ranks(optimizes)


def keeps_state() -> None:
    """Optimizer state that lies on the GPU, its step counters in host memory: to all ranks, and to one checkpoint."""
    fake, rank = begin(), hvd.rank()

    def made(**options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = placed(fake, torch.nn.Linear(6, 5))
        return model, hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), **options
        )

    def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [e[key] for e in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]

    model, optimizer = made()
    if rank == 0:  # as after loading a checkpoint
        for i, parameter in enumerate(model.parameters()):
            moment = fake.tensor(torch.full_like(parameter, i + 0.5))
            optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": moment, "exp_avg_sq": moment}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [m.mean().item() for m in moments(optimizer)] == [0.5, 0.5, 1.5, 1.5]
    assert all(fake.place_of(m) is not gpu.HOST for m in moments(optimizer)), "beside their parameters"
    steps = [entry["step"] for entry in optimizer.state.values()]
    assert steps == [7, 7] and all(fake.place_of(step) is gpu.HOST for step in steps)

    wholes = []
    for options in ({}, {"shard_optimizer_state": True}):
        model, optimizer = made(**options)
        for step in range(3):
            torch.manual_seed(step + 10 * rank)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            for entry in optimizer.state.values():  # Adam has made them beside CPU tensors
                for key in ("exp_avg", "exp_avg_sq"):
                    if fake.place_of(entry[key]) is gpu.HOST:
                        entry[key] = fake.tensor(entry[key])
        if options:
            optimizer.consolidate_state_dict()
        wholes.append(optimizer.state_dict()["state"])
    assert wholes[0].keys() == wholes[1].keys()
    for index, plain in wholes[0].items():
        for key, value in plain.items():
            torch.testing.assert_close(wholes[1][index][key], value, rtol=1e-5, atol=1e-7)


def test_fake_optimizer_state_on_the_gpu_is_broadcast_sharded_and_gathered(ranks) -> None:
    ranks(keeps_state)


def scatters() -> None:
    """ZeRO-1: NCCL reduces each bucket to shards, and gathers them only for who asks for whole gradients."""
    fake, rank, size = begin(), hvd.rank(), hvd.size()
    nccl = ctypes.CDLL(os.environ["HOROCLONE_NCCL_LIBRARY"])
    counts = lambda: [nccl.hc_fake_collectives(kind) for kind in (0, 4)]  # noqa: E731
    torch.manual_seed(0)
    model = placed(fake, torch.nn.Linear(6, 5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shard_optimizer_state=True
    )

    def gradients(of: int, step: int) -> list[torch.Tensor]:
        copy = torch.nn.Linear(6, 5)
        copy.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        torch.manual_seed(step + 10 * of)
        copy(torch.randn(4, 6)).square().sum().backward()
        return [p.grad for p in copy.parameters()]

    for step in range(4):
        expected = [sum(g) / size for g in zip(*(gradients(r, step) for r in range(size)), strict=True)]
        before = counts()
        torch.manual_seed(step + 10 * rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        if step == 2:
            optimizer.synchronize()
            for parameter, whole in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, whole)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            old = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            for parameter, was, whole in zip(model.parameters(), old, expected, strict=True):
                torch.testing.assert_close(parameter.detach(), was - 0.1 * whole)
        allreduces, scattered = (now - then for now, then in zip(counts(), before, strict=True))
        assert step == 0 or (allreduces, scattered) == (0, 1), (step, allreduces, scattered)


def test_fake_sharded_state_reduce_scatters_on_the_gpu(ranks) -> None:
    ranks(scatters)


def optimizes_by_adasum() -> None:
    fake, size = begin(), hvd.size()
    adasum = sys.modules["horoclone.torch.optimizer.adasum"]
    fake.patch(adasum)
    launches = lambda: fake.cuda.hc_fake_count(b"launches", 0)  # noqa: E731
    pinned = lambda: fake.cuda.hc_fake_count(b"pinned", 0)  # noqa: E731

    before = launches()
    on_gpu = trained(fake, op=hvd.Adasum)
    assert launches() > before and pinned() == 0, "all of it stayed on the GPU"
    for a, b in zip(on_gpu, trained(None, op=hvd.Adasum), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    everywhere = hvd.allgather(torch.cat([one.flatten() for one in on_gpu]).unsqueeze(0))
    assert all(torch.equal(row, everywhere[0]) for row in everywhere), "the same bits on every rank"
    # The averages of two machines are orthogonal: their sum.
    if os.environ.get("HOROCLONE_ADASUM") == "nodes":
        mine = torch.zeros(4)
        mine[hvd.rank()] = 4.0
        got = hvd.allreduce(fake.tensor(mine), op=hvd.Adasum)
        assert got.tolist() == [2.0] * 4 and size == 4


def on_two_machines() -> None:
    os.environ["HOROCLONE_NODE"] = "ab"[int(os.environ["HOROCLONE_RANK"]) // 2]
    optimizes_by_adasum()


def test_fake_the_adasum_optimizer_of_two_machines(ranks) -> None:
    ranks(on_two_machines, size=4, HOROCLONE_ADASUM="nodes")


def captures() -> None:
    fake, rank = begin(), hvd.rank()
    model = placed(fake, torch.nn.Linear(6, 5))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters()
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()

    with pytest.raises(HorovodInternalError, match="captured into a CUDA graph.*two whole steps"):
        fake.capture(step)
    for _ in range(3):
        step()
    replay = fake.capture(step)  # of the step only what is horoclone's is captured: the tensors are the CPU's
    bucket = optimizer._reducer.buckets[0].flat
    for value in (1.0, 10.0):
        bucket.fill_(value * (rank + 1))
        replay()
        fake.synchronize()
        assert torch.equal(bucket, torch.full_like(bucket, 1.5 * value))
    step()
    loss = fake.tensor(torch.ones(1))
    with pytest.raises(HorovodInternalError, match="'loss'.*captured"):
        fake.capture(lambda: hvd.allreduce_(loss, name="loss"))
    step()


def test_fake_the_optimizers_buckets_go_into_a_graph(ranks) -> None:
    ranks(captures)


def refuses_a_capture() -> None:
    """Its end is no error of its own: nothing that was given to a captured stream is left over there."""
    fake = begin()
    model = placed(fake, torch.nn.Linear(6, 5))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters()
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.full((2, 6), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with pytest.raises(HorovodInternalError, match="NCCL does not move"):
        fake.capture(step)
    optimizer.synchronize()  # what is left of that step, on every rank
    for _ in range(2):
        step()
    both = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]).unsqueeze(0).clone())
    assert torch.equal(both[0], both[1]), "training goes on"


def test_fake_where_ranks_share_a_gpu_a_capture_is_refused_and_training_goes_on(ranks) -> None:
    ranks(refuses_a_capture, HC_TEST_ONE_GPU="1")


def dies_while_the_device_works() -> None:
    fake = begin()
    # Read when horoclone makes its stream: what it enqueues has not begun when this rank dies
    if hvd.rank() == 1:
        os.environ["HC_FAKE_DELAY_US"] = "300000"
    data = fake.tensor(torch.ones(100_000))
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        handle = hvd.allreduce_async_(data, name="w", op=hvd.Sum)
        native().wait(handle)
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        native().stream_wait(handle, fake.stream)
        fake.synchronize()  # would wait for ever for the dead rank: another thread ends the communicator
        hvd.allreduce(torch.ones(1), name="after")
    say(seconds=time.monotonic() - began, rank=caught.value.rank, text=str(caught.value))
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="after that")


@pytest.mark.parametrize("noticed", [False, True], ids=["NCCL waits", "NCCL notices first"])
def test_fake_a_killed_rank_is_named_and_the_streams_of_the_others_go_on(ranks, noticed) -> None:
    environment = {"HC_FAKE_NCCL_FAIL": "0:1:6"} if noticed else {}
    team = ranks(dies_while_the_device_works, expect=[0, -signal.SIGKILL], **environment)
    heard = team.said(0, "seconds")[0]
    assert heard["rank"] == 1 and "rank 1" in heard["text"] and heard["seconds"] < 14, heard
    words = "remote process exited or there was a network error"
    assert (words in heard["text"]) == noticed, heard


def dies_between_peers() -> None:
    fake = begin()
    data = fake.tensor(torch.ones(100_000))
    hvd.synchronize(hvd.allreduce_async_(data, name="first", op=hvd.Sum))
    if hvd.rank() == 1:
        handle = hvd.allreduce_async_(data, name="w", op=hvd.Sum)
        os.kill(os.getpid(), signal.SIGKILL)
        hvd.synchronize(handle)
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        hvd.synchronize(hvd.allreduce_async_(data, name="w", op=hvd.Sum))
        hvd.allreduce(torch.ones(1), name="after")
    say(seconds=time.monotonic() - began, rank=caught.value.rank, text=str(caught.value))
    fake.synchronize()  # no stream waits for the dead rank
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="after that")
    hvd.shutdown()


def test_fake_a_killed_peer_on_the_same_gpu_is_named_and_nothing_hangs(ranks) -> None:
    team = ranks(dies_between_peers, expect=[0, -signal.SIGKILL], HC_TEST_ONE_GPU="1")
    heard = team.said(0, "seconds")[0]
    assert heard["rank"] == 1 and "rank 1" in heard["text"] and heard["seconds"] < 14, heard


def distributes() -> None:
    import torch.distributed as dist

    from horoclone.torch.c10d import group as c10d_group
    from horoclone.torch.c10d import tensors as c10d_tensors
    from horoclone.torch.c10d import work as c10d_work

    fake = begin()
    for module in (c10d_group, c10d_tensors, c10d_work):
        fake.patch(module)
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    dist.init_process_group("horoclone")

    def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return fake.late(torch.arange(1, 1 + math.prod(shape)).to(dtype).reshape(shape) * (rank + 1))

    total = torch.arange(1.0, 7.0) * 3
    tensor = mine(6)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and torch.equal(tensor, total)
    future = dist.all_reduce(tensor := mine(6), async_op=True).get_future()
    # What DDP does; a future of CUDA's puts the stream behind the result, as this does:
    (summed,) = future.wait()
    fake.synchronize()
    assert torch.equal(summed, total)
    dist.reduce(tensor := mine(6), 1, op=dist.ReduceOp.MAX)
    assert torch.equal(tensor, torch.arange(1.0, 7.0) * 2) or rank == 0
    dist.broadcast(tensor := mine(6), 1)
    assert torch.equal(tensor, torch.arange(1.0, 7.0) * 2)
    whole = fake.tensor(torch.zeros(12))
    dist.all_gather_into_tensor(whole, mine(6))
    assert torch.equal(whole, torch.cat([torch.arange(1.0, 7.0), torch.arange(1.0, 7.0) * 2]))
    parts = [fake.tensor(torch.zeros(4, dtype=torch.int64)) for _ in range(size)]
    dist.all_gather(parts, mine(4, dtype=torch.int64))
    assert [part.tolist() for part in parts] == [[1, 2, 3, 4], [2, 4, 6, 8]]
    share = fake.tensor(torch.zeros(3))
    dist.reduce_scatter_tensor(share, mine(6))  # FSDP's
    assert torch.equal(share, total[3 * rank : 3 * rank + 3])
    dist.all_to_all_single(rows := fake.tensor(torch.zeros(4, 2)), mine(4, 2))
    expected = torch.arange(1.0, 9.0).reshape(4, 2)[2 * rank : 2 * rank + 2]
    assert torch.equal(rows, torch.cat([expected, 2 * expected]))
    arrived = fake.tensor(torch.zeros(6))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(6), 1 - rank), dist.P2POp(dist.irecv, arrived, 1 - rank)]
    )
    for work in works:
        work.wait()
    assert torch.equal(arrived, torch.arange(1.0, 7.0) * (2 - rank))
    given = [mine(3), mine(3)] if rank == 0 else None
    fake.synchronize()  # a CPU tensor is concatenated at once
    dist.scatter(share, given)
    assert share.tolist() == [1.0, 2.0, 3.0]
    gathered = [fake.tensor(torch.zeros(6)) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(6), gathered)
    assert rank or torch.equal(gathered[1], torch.arange(1.0, 7.0) * 2)
    bits = fake.tensor(torch.tensor([1 + rank], dtype=torch.int32))
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert bits.item() == 3
    with pytest.raises(Mismatch, match="GPU"):
        dist.all_reduce(mine(3) if rank == 0 else torch.ones(3))
    dist.all_reduce(tensor := mine(6))
    assert torch.equal(tensor, total)
    dist.destroy_process_group()


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["nccl", "host"])
def test_fake_torch_distributed(ranks, way) -> None:
    ranks(distributes, HOROCLONE_GPU_OPERATIONS=way)
