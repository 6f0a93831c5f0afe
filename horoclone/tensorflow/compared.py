"""Compares variables of the ranks in the messages of gradients, eagerly and in functions (horoclone/comparison.py).

In a function steps are counted by a variable of its own, which no checkpoint has. Memory is read by the host only where
a check is due, and written only to repair. In TensorFlow 1's sessions and on GPUs nothing is compared.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horoclone.arrays.compared import NOTHING, Bytes, VariableComparison, bytes_of, hashes_of
from horoclone.comparison import FIRST, OFF, PLACES, Policy
from horoclone.ops import Adasum, Average, Max, Sum
from horoclone.process_sets import ProcessSet
from horoclone.runtime import steps
from horoclone.tensorflow.mpi_ops import native_of

Values = Callable[[], Sequence[tuple[str, Any]]]


class Watch:
    """Of the variables whose gradients one operation reduces. values: gives them, with what they are called."""

    def __init__(self, own: Policy, name: str, process_set: ProcessSet) -> None:
        self._comparison = VariableComparison(own, name, process_set, _size, _read, _write)
        self._count: Any = None  # of steps in functions
        self._number: Any = None  # of the step that is being traced
        self._labels: list[str] = []
        steps.counted.add(self)

    def restart(self) -> None:
        """Steps are counted from here again."""
        if self._count is not None:
            with tf.init_scope():
                self._count.assign(0)

    def tail(self, values: Values, dtype: Any) -> Any:
        """What travels behind the gradients: numbers of their dtype."""
        if tf.executing_eagerly():
            return tf.constant(self._comparison.fill(values), dtype)
        self._number = None
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return tf.zeros([PLACES], dtype)
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="horoclone_steps")
            pairs = self._comparison.listed(values)
        self._labels = [label for label, _ in pairs]
        self._number = number = self._count.assign_add(1) - 1
        if not pairs or self._comparison.own.action == OFF:
            return tf.zeros([PLACES], dtype)
        every, shares = self._comparison.every, self._comparison.shares

        def check(share: Sequence[int]) -> Any:
            read = [native_of(pairs[i][1]).read_value() for i in share]
            places = tf.numpy_function(self._check, [number, *read], tf.uint8)
            places.set_shape([PLACES])
            return tf.cast(places, dtype)

        which = tf.constant(0)
        arms = [lambda: tf.zeros([PLACES], dtype), partial(check, range(len(pairs)))]
        if every:
            is_due = (number % every == 0) & (number > 1)
            which = tf.where(is_due, 2 + tf.cast(number // every % len(shares), tf.int32), which)
            arms += [partial(check, share) for share in shares]
        which = tf.where(tf.equal(number, FIRST), 1, which)
        return tf.switch_case(which, arms)

    def _check(self, number: Any, *read: Any) -> Any:
        if self._comparison.agreed.action == OFF:
            return np.array(NOTHING, np.uint8)
        return np.array(self._comparison.places(int(number), [bytes_of(one) for one in read]), np.uint8)

    def look(self, received: Any, values: Values, reduced: Sequence[Any]) -> list[Any]:
        """The reduced gradients, which wait for what is to be said and repaired first. received: what has become of the
        tail."""
        if tf.executing_eagerly():
            self._comparison.look(received.numpy().astype(np.float32).tolist(), values)
            return list(reduced)
        if self._number is None:
            return list(reduced)
        number, labels = self._number, self._labels
        variables = [native_of(variable) for _, variable in values()]
        half = PLACES // 2
        differs = tf.reduce_any((received[:half] != 0) & (received[half:] != 0))

        def settle(number: Any, *read: Any) -> Any:
            content = [bytes_of(one) for one in read]
            mended = self._comparison.settle(int(number), labels, hashes_of(content), content)
            after = [
                mended[i].view(one.dtype).reshape(one.shape) if i in mended else one
                for i, one in enumerate(read)
            ]
            return [np.array(bool(mended)), *after]

        def said() -> Any:
            read = [variable.read_value() for variable in variables]
            is_mended, *after = tf.numpy_function(
                settle, [number, *read], [tf.bool, *(v.dtype for v in variables)]
            )
            is_mended.set_shape([])

            def write() -> Any:
                for variable, value in zip(variables, after, strict=True):
                    variable.assign(tf.ensure_shape(value, variable.shape))
                return True

            return tf.cond(is_mended, write, lambda: False)

        done = tf.cond(differs, said, lambda: False)
        with tf.control_dependencies([done]):
            return [tf.identity(gradient) for gradient in reduced]


def takes_tail(wires: Sequence[Any], op: int) -> bool:
    """Whether the places travel with these: of one tensor alone the operation takes no copy, which it should not have
    to."""
    return len(wires) > 1 and wires[0].dtype.is_floating and op in (Average, Sum, Max, Adasum)


def is_variable(value: Any) -> bool:
    """Of TensorFlow, or of Keras on it."""
    return isinstance(native_of(value), tf.Variable)


def _size(variable: Any) -> int | None:
    """In bytes; None where it cannot be read here."""
    native = native_of(variable)
    here = isinstance(native, tf.Variable) and "GPU" not in native.device and native.shape.is_fully_defined()
    return native.shape.num_elements() * native.dtype.size if here else None


def _read(variable: Any) -> Bytes:
    value = native_of(variable).read_value()
    if value.dtype.is_floating and value.dtype.size < 4:  # of some of them there is no view
        value = tf.bitcast(value, tf.uint16 if value.dtype.size == 2 else tf.uint8)
    return bytes_of(memoryview(value))  # numpy() would copy


def _write(variable: Any, content: Bytes) -> None:
    native = native_of(variable)
    native.assign(content.view(native.dtype.as_numpy_dtype).reshape(native.shape))
