"""The names, arguments and defaults of horovod.tensorflow (Horovod 0.28), which scripts rely on."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from world import FACTS, check_arguments, later

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")
compression, mpi_ops = later("horoclone.tensorflow.compression"), later("horoclone.tensorflow.mpi_ops")
compute_service = later("horoclone.tensorflow.data.compute_service")
library = later("horoclone.tensorflow.library")


def table() -> dict[str, Any]:
    """What Horovod takes, in its order and with its defaults; ours may take more behind it."""
    WORLD, none, Average = hvd.global_process_set, hvd.Compression.none, hvd.Average
    return {
        "allreduce": lambda tensor, average=None, device_dense="", device_sparse="", compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=WORLD, ignore_name_scope=False: 0,
        "grouped_allreduce": lambda tensors, average=None, device_dense="", device_sparse="", compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=WORLD, ignore_name_scope=False, name=None: 0,
        "allgather": lambda tensor, name=None, ignore_name_scope=False, process_set=WORLD: 0,
        "grouped_allgather": lambda tensors, name=None, ignore_name_scope=False, process_set=WORLD: 0,
        "broadcast": lambda tensor, root_rank, name=None, ignore_name_scope=False, process_set=WORLD: 0,
        "broadcast_": lambda variables, root_rank, name=None, process_set=WORLD: 0,
        "alltoall": lambda tensor, splits=None, name=None, ignore_name_scope=False, process_set=WORLD: 0,
        "reducescatter": lambda tensor, device_dense="", compression=none, op=Average, name=None, process_set=WORLD, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0: 0,
        "grouped_reducescatter": lambda tensors, device_dense="", compression=none, op=Average, process_set=WORLD, prescale_factor=1.0, postscale_factor=1.0: 0,
        "join": lambda: 0,
        "size_op": lambda process_set_id=0, name=None: 0,
        "rank_op": lambda name=None: 0,
        "local_size_op": lambda name=None: 0,
        "local_rank_op": lambda name=None: 0,
        "process_set_included_op": lambda process_set_id=0, name=None: 0,
        "broadcast_variables": lambda variables, root_rank, process_set=WORLD, inplace=False: 0,
        "broadcast_global_variables": lambda root_rank: 0,
        "broadcast_object": lambda obj, root_rank=0, session=None, name=None, process_set=WORLD: 0,
        "broadcast_object_fn": lambda root_rank=0, session=None, name=None, process_set=WORLD: 0,
        "allgather_object": lambda obj, session=None, name=None, process_set=WORLD: 0,
        "BroadcastGlobalVariablesHook": lambda root_rank, device="": 0,
        "DistributedOptimizer": lambda optimizer, name=None, use_locking=False, device_dense="", device_sparse="", compression=none, sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=WORLD, scale_local_gradients=True: 0,
        "DistributedGradientTape": lambda gradtape, device_dense="", device_sparse="", compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=WORLD, scale_local_gradients=True: 0,
        "PartialDistributedGradientTape": lambda gradtape, device_dense="", device_sparse="", compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=WORLD, local_layers=None, scale_local_gradients=True: 0,
        "init": lambda comm=None, process_sets=None: 0,
        "start_timeline": lambda file_path, mark_cycles=False: 0,
        "ProcessSet": lambda ranks_or_comm: 0,
    }  # fmt: skip


OF_TAPES: dict[str, Any] = {
    "gradient": lambda target, sources, output_gradients=None, use_generic_names=False: 0,
    "register_local_source": lambda source: 0,
    "get_local_and_global_gradients": lambda target, sources, output_gradients=None, use_generic_names=False: (
        0
    ),
}
OF_THE_SERVICE: dict[str, Any] = {
    "tf_data_service": lambda compute_config, rank: 0,
    "send_to_data_service": lambda dataset, compute_config, rank, size=None, processing_mode="distributed_epoch", reuse_dataset=False, round_robin=False: 0,
    "compute_worker_fn": lambda compute_config: 0,
}  # fmt: skip
OF_ITS_CONFIG: dict[str, Any] = {
    "compute_client": lambda verbose=1: 0,
    "write": lambda filename: 0,
    "read": lambda filename, wait_for_file_creation=False: 0,
    "to_dict": lambda: 0,
    "from_dict": lambda config: 0,
}
OTHERS = [
    "SyncBatchNormalization", "gpu_available", "check_extension", "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility", "refs_to_vars", "split_list", "vars_to_refs",
]  # fmt: skip


def test_functions_take_what_horovods_take() -> None:
    check_arguments(hvd, table())
    check_arguments(hvd.DistributedGradientTape(tf.GradientTape()), OF_TAPES)
    check_arguments(compute_service, OF_THE_SERVICE)
    check_arguments(compute_service.TfDataServiceConfig, OF_ITS_CONFIG)
    assert tf.data.Dataset.send_to_data_service is compute_service.send_to_data_service


def test_every_other_name_is_there() -> None:
    assert not [name for name in [*FACTS, *OTHERS] if not hasattr(hvd, name)]
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    assert "SyncBatchNormalization" in dir(hvd)
    assert [hvd.check_num_rank_power_of_2(n) for n in (0, 1, 3, 4)] == [False, True, False, True]
    assert hvd.handle_average_backwards_compatibility(None, False) == hvd.Sum
    variable = tf.Variable(1.0)
    assert hvd.refs_to_vars(hvd.vars_to_refs([variable]))[0] is variable
    assert issubclass(hvd.Compression.fp16, compression.Compressor)
    assert issubclass(hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
    assert inspect.signature(hvd.SyncBatchNormalization).parameters["fused"].default is False
    assert (
        not [name for name in sys.modules["horoclone.tensorflow"].__all__ if not hasattr(hvd, name)]
        and hvd.init is mpi_ops.init
    )


def test_the_ops_are_registered_under_their_names() -> None:
    """Graphs that were saved name them; those with inputs have gradients."""
    with_gradient = "Allreduce GroupedAllreduce Allgather GroupedAllgather Broadcast Alltoall Reducescatter GroupedReducescatter"
    without = "Join Size LocalSize Rank LocalRank ProcessSetIncluded"
    from tensorflow.python.framework import ops

    for name in [*with_gradient.split(), *without.split()]:
        python_name = "".join("_" + c.lower() if c.isupper() else c for c in "Horovod" + name).lstrip("_")
        assert callable(getattr(library.functions, python_name)), name
        gradient = ops.gradient_registry.lookup("Horovod" + name)
        assert (gradient is None) == (name in without.split()), name


def test_on_a_gpu_every_argument_is_in_host_memory() -> None:
    """The kernels for GPUs are there without one, so this needs none."""
    from tensorflow.python.framework import kernels

    for name, arguments in {
        "HorovodGroupedAllreduce": {"tensors", "guard", "sum"},
        "HorovodAlltoall": {"tensor", "splits", "guard", "output", "received_splits"},
        "HorovodBroadcast": {"tensor", "guard", "output"},
        "HorovodSize": {"size"},
    }.items():
        kinds = {k.device_type: k for k in kernels.get_registered_kernels_for_op(name).kernel}
        assert set(kinds) == {"CPU", "GPU"} and not kinds["CPU"].host_memory_arg
        assert set(kinds["GPU"].host_memory_arg) == arguments


def test_names_that_libraries_take_from_horovod() -> None:
    """They exist, can be derived from and asked with isinstance; functions are plain, their defaults can be seen."""
    import tensorflow as tf

    import horoclone._keras
    import horoclone.tensorflow as hvd
    from horoclone.tensorflow import functions, mpi_ops

    assert callable(functions._make_broadcast_group_fn()) and hvd.broadcast_ is mpi_ops.broadcast_
    assert callable(horoclone._keras.create_distributed_optimizer) and hvd._allreduce is mpi_ops._allreduce
    assert callable(
        hvd._make_allreduce_grads_fn("name", "", "", hvd.Compression.none, False, hvd.Sum, 1.0, 0)
    )

    class Derived(hvd._DistributedOptimizer):  # type: ignore[misc]
        pass

    plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    assert isinstance(Derived(plain), hvd._LegacyOptimizer)
    wrapped = hvd.DistributedOptimizer(plain)
    assert isinstance(wrapped, hvd._DistributedOptimizer)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(wrapped)
    assert hvd.broadcast.__defaults__[:2] == (None, False)
    for name in ("allreduce", "allgather", "alltoall", "reducescatter", "grouped_allreduce", "broadcast_"):
        assert getattr(hvd, name).__code__.co_name == name
