"""The names, arguments and defaults of horovod.torch (Horovod 0.28), which scripts rely on, and calls in both ways."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from world import FACTS, check_arguments, ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone.torch import mpi_ops, optimizer

WORLD = hvd.global_process_set
none = hvd.Compression.none
Average = hvd.Average

# What Horovod takes, in its order and with its defaults; ours may take more behind it.
TABLE: dict[str, Any] = {
    "allreduce": lambda tensor, average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD: 0,
    "allreduce_async": lambda tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD: 0,
    "grouped_allreduce": lambda tensors, average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD: 0,
    "grouped_allreduce_async": lambda tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD: 0,
    "sparse_allreduce_async": lambda tensor, name, op, process_set=WORLD: 0,
    "allgather": lambda tensor, name=None, process_set=WORLD: 0,
    "grouped_allgather": lambda tensors, name=None, process_set=WORLD: 0,
    "broadcast": lambda tensor, root_rank, name=None, process_set=WORLD: 0,
    "alltoall": lambda tensor, splits=None, name=None, process_set=WORLD: 0,
    "reducescatter": lambda tensor, name=None, compression=none, op=Average, process_set=WORLD, prescale_factor=1.0, postscale_factor=1.0: 0,
    "reducescatter_async": lambda tensor, name=None, op=Average, process_set=WORLD, prescale_factor=1.0, postscale_factor=1.0: 0,
    "grouped_reducescatter": lambda tensors, name=None, compression=none, op=Average, process_set=WORLD, prescale_factor=1.0, postscale_factor=1.0: 0,
    "grouped_reducescatter_async": lambda tensors, name=None, op=Average, process_set=WORLD, prescale_factor=1.0, postscale_factor=1.0: 0,
    "join": lambda device=-1: 0,
    "barrier": lambda process_set=WORLD: 0,
    "poll": lambda handle: 0,
    "synchronize": lambda handle: 0,
    "broadcast_parameters": lambda params, root_rank: 0,
    "broadcast_optimizer_state": lambda optimizer, root_rank, model=None: 0,
    "broadcast_object": lambda obj, root_rank=0, name=None, process_set=WORLD: 0,
    "allgather_object": lambda obj, name=None: 0,
    "DistributedOptimizer": lambda optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=WORLD: 0,
    "SyncBatchNorm": lambda num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True: 0,
    "init": lambda comm=None, process_sets=None: 0,
    "start_timeline": lambda file_path, mark_cycles=False: 0,
    "add_process_set": lambda process_set: 0,
    "remove_process_set": lambda process_set: 0,
    "ProcessSet": lambda ranks_or_comm: 0,
}  # fmt: skip
SAME = {  # name -> whose arguments it has
    "allreduce_": "allreduce_async", "allreduce_async_": "allreduce_async",
    "grouped_allreduce_": "grouped_allreduce_async", "grouped_allreduce_async_": "grouped_allreduce_async",
    "allgather_async": "allgather", "grouped_allgather_async": "grouped_allgather", "broadcast_": "broadcast",
    "broadcast_async": "broadcast", "broadcast_async_": "broadcast", "alltoall_async": "alltoall",
}  # fmt: skip
OF_ELASTIC: dict[str, Any] = {
    "ElasticSampler": lambda dataset, shuffle=True, seed=0: 0,
    "TorchState": lambda model=None, optimizer=None: 0,
    "run": lambda func: 0,
}
OF_AN_OPTIMIZER: dict[str, Any] = {
    "synchronize": lambda: 0,
    "skip_synchronize": lambda: 0,
    "set_backward_passes_per_step": lambda passes: 0,
    "zero_grad": lambda: 0,
}


def test_functions_take_what_horovods_take() -> None:
    whole = TABLE | {name: TABLE[other] for name, other in SAME.items()}
    check_arguments(hvd, whole)
    check_arguments(mpi_ops, {name: wanted for name, wanted in whole.items() if hasattr(mpi_ops, name)})
    check_arguments(hvd.elastic, OF_ELASTIC)


def test_every_other_name_is_there() -> None:
    assert not [name for name in FACTS if not hasattr(hvd, name)]
    assert not [
        name for name in ("HorovodInternalError", "_basics", *FACTS[:21]) if not hasattr(mpi_ops, name)
    ]
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    from horoclone.torch.compression import Compressor

    assert issubclass(hvd.Compression.fp16, Compressor) and issubclass(hvd.Compression.none, Compressor)
    assert issubclass(hvd.SyncBatchNorm, torch.nn.modules.batchnorm._BatchNorm)
    for name in ("set_epoch", "record_batch", "state_dict", "load_state_dict", "reset"):
        assert callable(getattr(hvd.elastic.ElasticSampler, name))
    assert hasattr(optimizer, "DistributedOptimizer")


@ranks(1)
def test_a_wrapped_optimizer_takes_what_horovods_takes() -> None:
    for op in (hvd.Average, hvd.Adasum):
        model = torch.nn.Linear(2, 1)
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=op)
        assert type(wrapped).__name__ == "SGD" and isinstance(wrapped, torch.optim.SGD)
        check_arguments(wrapped, OF_AN_OPTIMIZER)
        for given in ((), (None,), (lambda: torch.zeros(()),)):
            model(torch.ones(1, 2)).sum().backward()
            wrapped.step(*given)
            wrapped.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        wrapped.step(closure=None)
        for call in (lambda w: w.zero_grad(set_to_none=False), lambda w: w.zero_grad(False)):
            call(wrapped)
            assert [p.grad.abs().sum().item() for p in model.parameters()] == [0.0, 0.0]
        for call in (lambda w: w.zero_grad(set_to_none=True), lambda w: w.zero_grad()):
            model(torch.ones(1, 2)).sum().backward()
            wrapped.step()
            call(wrapped)
            assert [p.grad for p in model.parameters()] == [None, None]


def arguments_of(name: str) -> dict[str, Any]:
    """Every argument in Horovod's order, none with its default's effect where that can be seen in the result."""
    given: dict[str, Any] = {
        "tensor": torch.arange(4.0) + hvd.rank(), "tensors": [torch.arange(4.0) + hvd.rank(), torch.ones(2, 2)],
        "average": None, "name": None, "compression": none, "op": hvd.Sum, "prescale_factor": 2.0,
        "postscale_factor": 3.0, "process_set": WORLD, "root_rank": 1, "splits": torch.tensor([1, 3], dtype=torch.int32),
    }  # fmt: skip
    wanted = TABLE[SAME.get(name, name)]
    return {one: given[one] for one in inspect.signature(wanted).parameters}


def expected_of(name: str) -> Any:
    """What a call with arguments_of() gives."""
    base = name.removeprefix("grouped_").removesuffix("_").removesuffix("_async").removeprefix("sparse_")
    me = hvd.rank()
    both = [torch.arange(4.0) + r for r in range(2)]
    result: Any = {
        "allreduce": 6 * (both[0] + both[1]),
        "allgather": torch.cat(both),
        "broadcast": both[1],
        "alltoall": torch.cat([part.split([1, 3])[me] for part in both]),
        "reducescatter": 6 * (both[0] + both[1])[2 * me : 2 * me + 2],
    }[base]
    if not name.startswith("grouped_"):
        return result
    ones = torch.ones(2, 2)
    return [
        result,
        {"allreduce": 12 * ones, "allgather": torch.ones(4, 2), "reducescatter": 12 * ones[:1]}[base],
    ]


def equal(result: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(result) == len(expected) and all(map(torch.equal, result, expected))
    return torch.equal(result, expected)


OPERATIONS = [
    name
    for name in (*TABLE, *SAME)
    if any(word in name for word in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"))
    and not any(word in name for word in ("sparse", "object", "parameters", "state"))
]


@ranks(2)
def test_calls_by_position_and_by_keyword_mean_the_same() -> None:
    assert len(OPERATIONS) == 22
    for name in OPERATIONS:
        for by_position in (True, False):
            given = arguments_of(name)
            call = getattr(hvd, name)
            result = call(*given.values()) if by_position else call(**given)
            if "_async" in name:
                result = hvd.synchronize(result)
            if name.startswith("alltoall"):
                result, received = result
                assert received.tolist() == [1 + 2 * hvd.rank()] * 2
            assert equal(result, expected_of(name)), (name, by_position, result)
            source = given.get("tensor", given.get("tensors"))
            changed = equal(source, expected_of(name)) if name.endswith("_") else True
            assert changed, f"{name} works in place"
    sparse = torch.eye(2).to_sparse()
    for handle in (
        hvd.sparse_allreduce_async(sparse, "s", hvd.Sum, WORLD),
        hvd.sparse_allreduce_async(tensor=sparse, name="s2", op=hvd.Sum, process_set=WORLD),
    ):
        assert hvd.synchronize(handle).to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert hvd.allreduce(torch.ones(2), False, "third").tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(torch.ones(2), True, None, none, hvd.Sum)


BEYOND: dict[str, Any] = {
    "reduce": lambda tensor, root_rank, op=Average, name=None, prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD: 0,
    "gather": lambda tensor, root_rank, name=None, process_set=WORLD: 0,
    "scatter": lambda tensor, root_rank, splits=None, name=None, process_set=WORLD: 0,
    "send": lambda tensor, dst, tag=0, process_set=WORLD: 0,
    "recv": lambda tensor=None, src=None, tag=0, process_set=WORLD: 0,
    "allgather_object": lambda obj, name=None, process_set=WORLD: 0,
}  # fmt: skip
LIKE = {
    "reduce_": "reduce", "reduce_async": "reduce", "reduce_async_": "reduce", "gather_async": "gather",
    "scatter_async": "scatter", "isend": "send", "irecv": "recv",
}  # fmt: skip


def test_what_is_beyond_horovod_has_the_same_arguments_on_arrays_and_tensors() -> None:
    import horoclone

    whole = BEYOND | {name: BEYOND[other] for name, other in LIKE.items()}
    check_arguments(hvd, whole)
    for name in [*whole, *TABLE, *SAME]:
        if not hasattr(horoclone, name) or name in ("ProcessSet", "init", "broadcast_object"):
            continue
        ours = [p.name for p in inspect.signature(getattr(hvd, name)).parameters.values()]
        theirs = [p.name for p in inspect.signature(getattr(horoclone, name)).parameters.values()]
        translated = [
            {"tensor": "array", "tensors": "arrays"}.get(one, one) for one in ours if one != "compression"
        ]
        assert theirs == translated, name
        assert inspect.signature(getattr(hvd, name)).parameters[ours[-1]].default == (
            inspect.signature(getattr(horoclone, name)).parameters[theirs[-1]].default
        )
    every = {name for name in (*whole, *TABLE, *SAME) if name not in {
        "sparse_allreduce_async", "broadcast_parameters", "broadcast_optimizer_state", "DistributedOptimizer", "SyncBatchNorm",
    }}  # fmt: skip
    assert not [name for name in every if not hasattr(horoclone, name)]


@ranks(2)
def test_one_gradient_is_reduced_by_horovods_private_name():
    """pytorch-ignite tells by it that an optimizer is distributed; scripts call it in hooks of their own."""
    model = torch.nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped_sgd(model, 1.0)
    assert not hasattr(torch.optim.SGD(model.parameters(), lr=1.0), "_allreduce_grad_async")
    for gradient, expected in ((torch.full((1, 3), float(hvd.rank() * 4)), 2.0), (None, 0.0)):
        model.weight.grad = gradient
        handle, ctx = optimizer._allreduce_grad_async(model.weight)
        hvd.synchronize(handle)
        assert ctx is None and model.weight.grad.tolist() == [[expected] * 3]
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()  # the step's own reduction goes on as ever
    optimizer.step()
    assert torch.allclose(model.weight, before - 1.0)
