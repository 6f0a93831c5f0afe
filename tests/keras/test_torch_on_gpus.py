"""Keras on the torch backend with variables and gradients on GPUs: on the fakes of CUDA and NCCL, and on real GPUs.

The fake's device memory is host memory, so Keras computes as on the CPU; horoclone sees tensors on a GPU. The stand-in
for torch.cuda is the torch binding's (tests/torch/test_gpu_fake.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, load

torch = pytest.importorskip("torch")
later("keras")

STAND_IN = Path(__file__).resolve().parent.parent / "torch" / "test_gpu_fake.py"


@pytest.fixture(scope="module")
def warm() -> Iterator[Any]:
    import worker_pool

    # Keras asks at its import whether there is a GPU. Without the second variable torch then begins to use CUDA, and
    # the ranks, which are forked from there, cannot.
    env = {**os.environ, "KERAS_BACKEND": "torch", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    made = worker_pool.WorkerPool(env, "torch", "keras", "horoclone.keras")
    yield made
    made.close()


def trained(fake: Any, **options: Any) -> tuple[list[Any], dict[str, list[float]]]:
    """Weights and history of a fit in which ranks start apart and see different data."""
    import keras

    import horoclone.keras as hvd

    keras.utils.set_random_seed(7 + hvd.rank())
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options)
    model.compile(optimizer, "mse", metrics=["mae"])
    optimizer.build(model.trainable_variables)
    if fake is not None:
        for variable in (*model.weights, *optimizer.variables):
            variable.value.data = fake.tensor(variable.value.data)
    chance = np.random.default_rng(hvd.rank())
    x, y = chance.normal(size=(24, 6)).astype("float32"), chance.normal(size=(24, 2)).astype("float32")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    fit = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return [keras.ops.convert_to_numpy(w) for w in model.weights], fit.history


def checked(weights: list[Any], history: dict[str, list[float]], reference: Any) -> None:
    import horoclone.keras as hvd

    everybody = hvd.allgather_object((weights, history))
    for theirs, logs in everybody:
        assert all(np.array_equal(a, b) for a, b in zip(theirs, weights, strict=True)), (
            "the same on every rank"
        )
        assert logs == history, "metrics are everybody's average"
    for a, b in zip(weights, reference[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(history["mae"], reference[1]["mae"], rtol=1e-4)


def trains_on_the_fake() -> None:
    fake = load(STAND_IN, "gpu_stand_in").begin()
    import horoclone.keras as hvd
    from horoclone.keras import on_torch
    from horoclone.torch.operations import gpu

    dense, seen = on_torch.dense, []

    def on_the_gpu(gradient: Any) -> Any:  # where the backward pass of a model on a GPU leaves it
        seen.append(fake.tensor(dense(gradient)))
        assert fake.place_of(seen[-1]) is not gpu.HOST
        return seen[-1]

    for options in ({}, {"op": hvd.Sum, "groups": 2}, {"backward_passes_per_step": 2}, {"op": hvd.Adasum}):
        reference = trained(None, **options)
        seen.clear()
        on_torch.dense = on_the_gpu
        checked(*trained(fake, **options), reference)
        on_torch.dense = dense
        assert seen, "gradients were on the GPU"
    cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
    assert cuda.hc_fake_count(b"launches", 0) > 0, "kernels packed the gradients"
    assert cuda.hc_fake_count(b"pinned", 0) == 0, "nothing went through host memory"


def trains_on_real_gpus() -> None:
    import keras

    import horoclone.keras as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    for options in ({}, {"op": hvd.Sum, "groups": 2}, {"op": hvd.Adasum}):
        with keras.device("cpu"):
            reference = trained(None, **options)
        with keras.device(f"gpu:{torch.cuda.current_device()}"):
            checked(*trained(None, **options), reference)


def run(warm: Any, body: Any, env: dict[str, str]) -> None:
    import worker_pool

    for start in worker_pool.teams_of(warm):
        team = start(body, 2, env=env)
        assert team.wait(120) == [0, 0], team.outputs()


@pytest.mark.long(15)
def test_fake_keras_on_torch_trains_on_gpus_as_on_the_host(warm: Any, on_fakes: dict[str, str]) -> None:
    run(warm, trains_on_the_fake, on_fakes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch.cuda.is_available() is False")
@pytest.mark.timeout(600)
def test_keras_on_torch_trains_on_real_gpus_as_on_the_host(warm: Any) -> None:
    run(warm, trains_on_real_gpus, {})
