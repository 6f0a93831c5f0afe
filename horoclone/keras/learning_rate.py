"""Reads and sets an optimizer's learning rate and momentum between steps: Keras 3, tf_keras, tf_keras.legacy."""

from __future__ import annotations

from typing import Any

from horoclone.keras.flavor import LEGACY, assign, keras, to_numpy


def learning_rate_of(optimizer: Any) -> float:
    """The rate of the next step."""
    if LEGACY:
        return float(keras.backend.get_value(optimizer.learning_rate))
    return float(to_numpy(optimizer.learning_rate))


def learning_rate_if_known(optimizer: Any) -> float | None:
    """The rate of the next step; None where it cannot be read (no optimizer, a schedule of tf_keras)."""
    try:
        if LEGACY and optimizer is not None:
            _refuse_schedule(optimizer)
        return None if optimizer is None else learning_rate_of(optimizer)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return None


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Sets the rate. TypeError when the optimizer has a schedule or a function in its place."""
    try:
        if LEGACY:
            _refuse_schedule(optimizer)
            keras.backend.set_value(optimizer.learning_rate, rate)
        else:
            optimizer.learning_rate = rate
    except (TypeError, AttributeError) as error:
        raise TypeError(
            "the learning rate of this optimizer cannot be set: it comes from a schedule or a function. Give the "
            "optimizer a number, or leave the learning-rate callbacks of horoclone out."
        ) from error


def _refuse_schedule(optimizer: Any) -> None:
    """tf_keras would set the rate that the schedule gave last."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    source = getattr(optimizer, "_hyper", {}).get("learning_rate", getattr(optimizer, "_learning_rate", None))
    if isinstance(source, keras.optimizers.schedules.LearningRateSchedule):
        raise TypeError(f"the rate comes from {source}")


_WITHOUT_RATE = getattr(keras.optimizers, "Muon", ())


def rescale_momentum(optimizer: Any, factor: float) -> None:
    """Multiplies the gathered momentum of SGD and RMSprop, which contains the learning rate; that of Muon does not, and
    others have none.

    The step m' = momentum * m - rate * g then is what the momentum `momentum * factor` would make of the old m. The
    buffers can be changed between compiled steps; the hyperparameter is a constant in them.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, _WITHOUT_RATE) or not getattr(optimizer, "momentum", None):
        return
    if not _has_momentum(optimizer):
        return
    for variable in _momentum_variables(optimizer):
        assign(variable, to_numpy(variable) * factor)


def _has_momentum(optimizer: Any) -> bool:
    momentum = optimizer.momentum
    return bool((keras.backend.get_value(momentum) if LEGACY else momentum) > 0)


def _momentum_variables(optimizer: Any) -> list[Any]:
    if hasattr(optimizer, "get_slot_names"):  # tf_keras.optimizers.legacy
        slots = [optimizer._slots.get(key, {}) for key in optimizer._slots]
        return [slot["momentum"] for slot in slots if "momentum" in slot]
    for name in ("momentums", "_momentums"):
        found = getattr(optimizer, name, None)
        if found:
            return [variable for variable in found if variable is not None]
    return []
