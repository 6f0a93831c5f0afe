"""Worlds for Keras: one per backend, since a process fixes its backend when it imports Keras."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worker_pool import warm_processes
from world import Worlds

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
PROCESS = {
    "tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "jax": {"KERAS_BACKEND": "jax"},
    "torch": {"KERAS_BACKEND": "torch"},
    "legacy": {"TF_USE_LEGACY_KERAS": "1"},
}
NEEDS = {
    "tensorflow": ("keras", "tensorflow"),
    "jax": ("keras", "jax"),
    "torch": ("keras", "torch"),
    "legacy": ("tf_keras", "tensorflow"),
}


@pytest.fixture(scope="package")
def worlds_of() -> Iterator[Callable[[str], Worlds]]:
    """worlds_of(backend).run(size, body, ...): see world.Worlds."""
    pools: dict[str, Worlds] = {}

    def of(backend: str) -> Worlds:
        if backend not in pools:
            env = {**QUIET, **PROCESS[backend]}
            whole = {**os.environ, "OMP_NUM_THREADS": "1", **env}
            pools[backend] = Worlds(
                env, lambda _: warm_processes(f"keras on {backend}", whole, ["horoclone.keras"])
            )
        return pools[backend]

    yield of
    for pool in pools.values():
        pool.end()


@pytest.fixture
def on(worlds_of: Callable[[str], Worlds]) -> Callable[..., list[Any]]:
    """on(backend, body, size=2, **kwargs) runs a module-level function on ranks that have Keras on that backend."""

    def run(
        backend: str, body: Callable[..., Any], size: int = 2, limit_s: float = 180.0, **kwargs: Any
    ) -> list[Any]:
        """limit_s: the first bodies compile much, which takes long on a busy machine."""
        __tracebackhide__ = True
        for package in NEEDS[backend]:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        return worlds_of(backend).run(size, body, limit_s=limit_s, **kwargs)

    return run
