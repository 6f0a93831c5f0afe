"""The names, arguments and defaults of horovod.keras and horovod.tensorflow.keras (Horovod 0.28), with both Kerases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from world import FACTS, differences

NAMES = [*FACTS, "callbacks", "load_model", "broadcast_object", "allgather_object"]


def tables(hvd: Any) -> dict[str, dict[str, Any]]:
    """What Horovod takes, in its order and with its defaults; ours may take more behind it."""
    none, Average, WORLD = hvd.Compression.none, hvd.Average, hvd.global_process_set
    of_both: dict[str, Any] = {
        "allreduce": lambda value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=none: 0,
        "allgather": lambda value, name=None: 0,
        "broadcast": lambda value, root_rank, name=None: 0,
        "reducescatter": lambda value, name=None, op=Average: 0,
        "broadcast_global_variables": lambda root_rank: 0,
        "load_model": lambda filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False: 0,
    }  # fmt: skip
    return {
        "horovod.keras": {
            **of_both,
            "DistributedOptimizer": lambda optimizer, name=None, device_dense="", device_sparse="", compression=none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, num_groups=0, groups=None: 0,
            "PartialDistributedOptimizer": lambda optimizer, name=None, device_dense="", device_sparse="", compression=none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=WORLD, local_layers=None, scale_local_gradients=True: 0,
        },
        "horovod.tensorflow.keras": {
            **of_both,
            "DistributedOptimizer": lambda optimizer, name=None, device_dense="", device_sparse="", compression=none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=WORLD, scale_local_gradients=True: 0,
        },
        "callbacks": {
            "BroadcastGlobalVariablesCallback": lambda root_rank, device="", local_variables=None: 0,
            "MetricAverageCallback": lambda device="": 0,
            "LearningRateScheduleCallback": lambda initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None: 0,
            "LearningRateWarmupCallback": lambda initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0: 0,
            "BestModelCheckpoint": lambda monitor="val_loss", verbose=0, save_weights_only=False, mode="auto", save_freq="epoch": 0,
        },
    }  # fmt: skip


def takes_what_horovods_takes() -> None:
    import importlib

    from horoclone import horovod_alias

    horovod_alias.install()
    hvd = importlib.import_module("horovod.keras")
    wrong = {}
    for owner, table in tables(hvd).items():
        for where in ("horovod.keras", "horovod.tensorflow.keras") if owner == "callbacks" else (owner,):
            holder = importlib.import_module(f"{where}.callbacks" if owner == "callbacks" else where)
            for name, theirs in table.items():
                if reason := differences(getattr(holder, name), theirs):
                    wrong[f"{holder.__name__}.{name}"] = reason
            if owner != "callbacks":
                assert not [name for name in NAMES if not hasattr(holder, name)]
                assert owner == "horovod.keras" or holder.is_version_greater_equal_than("2.16.0", "2.4.0")
                assert not [name for name in holder.__all__ if not hasattr(holder, name)]
    assert not wrong, wrong
    assert callable(hvd.callbacks.BroadcastGlobalVariablesCallback.register_local_var)
    for kind in (hvd.Compression.none, hvd.Compression.fp16):
        assert callable(kind.compress) and callable(kind.decompress)


@pytest.mark.parametrize("backend", ["torch", "legacy"])
def test_functions_and_callbacks_take_what_horovods_take(on: Callable[..., Any], backend: str) -> None:
    on(backend, takes_what_horovods_takes)
