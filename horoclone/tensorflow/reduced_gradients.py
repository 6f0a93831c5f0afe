"""Which gradients a DistributedGradientTape has reduced already, so that an optimizer does not do it again.

A tape marks the gradients that it returns. A marked gradient is recognised by identity (for tf.IndexedSlices also by
its values), whether a function made, captured or returned it. In a graph so is everything computed from marked
gradients, constants and variables alone: clipped, scaled, summed, made dense. Values into which data flows are not
recognised, because they may differ between ranks; random numbers, for the same reason, only where the reduction changes
what it reduces twice. In eager mode a changed gradient is a new object without a mark;
there the variable remembers, until its next update, that a tape has reduced its gradient. Nothing is checked in a
process that has marked none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from horoclone.tensorflow.mpi_ops import native_of

_MARK = "_horoclone_reduced"
_used = False

# What a tensor is made of: data of this rank, only constants and variables, or gradients that a tape has reduced.
_OTHER, _NEUTRAL, _REDUCED = range(3)

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_NEUTRAL_OPS = {
    "Const", "VarHandleOp", "ReadVariableOp", "ResourceGather", "VariableV2", "HorovodSize", "HorovodGuard",
}  # fmt: skip
_OPS_WITH_STATE = {*_CALLS, "If", "While", "Case"}  # as good as what goes into them


def _parts(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        parts = [gradient.values, gradient.indices, gradient.dense_shape]
        return [part for part in parts if tf.is_tensor(part)]
    return [gradient] if tf.is_tensor(gradient) else []


def _is_symbolic(tensor: Any) -> bool:
    return not hasattr(tensor, "numpy")


def mark(gradients: Sequence[Any], variables: Iterable[Any] = ()) -> None:
    """These gradients need no further reduction. variables: those that are to remember it."""
    global _used
    _used = True
    for gradient in gradients:
        for part in _parts(gradient):
            if _is_symbolic(part):
                marked = getattr(part.graph, _MARK, None)
                if marked is None:
                    marked = set()
                    setattr(part.graph, _MARK, marked)
                marked.add(part.name)
            else:
                setattr(part, _MARK, True)
    # What a function's tape reduces is reduced each time it runs, although it is traced only once.
    remembered = "until the next update" if tf.executing_eagerly() else "always"
    for variable in map(native_of, variables):
        if isinstance(variable, tf.Variable):
            setattr(variable, _MARK, remembered)


def are_reduced(gradients: Sequence[Any], variables: Sequence[Any], by_variable: bool) -> list[bool]:
    """For each gradient whether a tape has reduced it. None is not.

    by_variable: eagerly, to ask the variables too, and in a graph to recognise what random numbers were added to. That
    is for reductions that change the result when they are done twice (Sum); for others it is not worth the risk of a
    gradient of another origin.
    """
    if not _used:
        return [False] * len(gradients)
    walk = _Walk(by_variable)
    found = []
    for gradient, variable in zip(gradients, map(native_of, variables), strict=True):
        parts = _parts(gradient)
        reduced = bool(parts) and walk.origin(parts[0]) == _REDUCED
        if tf.executing_eagerly():
            remembered = getattr(variable, _MARK, None)
            reduced = reduced or (by_variable and bool(parts) and remembered is not None)
            if remembered == "until the next update":
                delattr(variable, _MARK)
        found.append(reduced)
    return found


class _Walk:
    """From tensors of graphs back to what they are made of; remembers what it has found out."""

    def __init__(self, random_is_neutral: bool) -> None:
        self._random_is_neutral = random_is_neutral
        self._known: dict[tuple[int, str], int] = {}
        # Of each graph: a placeholder's name -> the tensor outside
        self._captures: dict[int, dict[str, Any]] = {}

    def origin(self, tensor: Any) -> int:
        """What the tensor is made of: the worst of its parts."""
        if not _is_symbolic(tensor):
            return _origin_of_eager(tensor)
        known, stack = self._known, [tensor]
        entered: set[tuple[int, str]] = set()
        while stack:
            current = stack[-1]
            key = _key(current)
            if key in known:
                stack.pop()
                continue
            sources = self._sources(current)
            if isinstance(sources, int):
                known[key] = sources
            elif (
                key in entered
            ):  # its sources are known, but for those that depend on it (loops of TensorFlow 1)
                origins = [
                    known.get(_key(s), _NEUTRAL) if _is_symbolic(s) else _origin_of_eager(s) for s in sources
                ]
                known[key] = _OTHER if _OTHER in origins else max(origins, default=_NEUTRAL)
            else:
                entered.add(key)
                stack += [s for s in sources if _is_symbolic(s) and _key(s) not in entered]
        return known[_key(tensor)]

    def _sources(self, tensor: Any) -> int | list[Any]:
        """What a graph's tensor is, or the tensors that it is made of."""
        graph, op = tensor.graph, tensor.op
        if tensor.name in getattr(graph, _MARK, ()):
            return _REDUCED
        if (
            tensor.dtype == tf.resource
            or op.type in _NEUTRAL_OPS
            or (op.type.startswith("Random") and self._random_is_neutral)
            or op.type.startswith("StatelessRandom")
        ):
            return _NEUTRAL
        if op.type == "Placeholder":
            captured = self._captured(tensor)
            return _OTHER if captured is None else [captured]
        if op.type in _CALLS:
            inner = _result_inside(tensor)
            if inner is not None and self.origin(inner) == _REDUCED:
                return _REDUCED
        has_state = op.op_def.is_stateful and op.type not in _OPS_WITH_STATE
        if not op.inputs or has_state or op.type == "PlaceholderWithDefault":
            return _OTHER
        return list(op.inputs)

    def _captured(self, placeholder: Any) -> Any:
        """The tensor outside of a function that stands behind this input of its graph; None for an argument."""
        graph = placeholder.graph
        if id(graph) not in self._captures:
            pairs = getattr(graph, "captures", ())
            self._captures[id(graph)] = {inside.name: outside for outside, inside in pairs}
        return self._captures[id(graph)].get(placeholder.name)


def _key(tensor: Any) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


def _origin_of_eager(tensor: Any) -> int:
    if getattr(tensor, _MARK, False):
        return _REDUCED
    # Numbers are settings; so are handles of variables. Anything else that a function captures may be data.
    return _NEUTRAL if tensor.shape.rank == 0 or tensor.dtype == tf.resource else _OTHER


def _result_inside(tensor: Any) -> Any:
    """The tensor in a function's graph that a call of the function gives, if it can be found."""
    name = tensor.op.get_attr("f").name
    function = getattr(tensor.graph, "_functions", {}).get(name)
    outputs = getattr(getattr(function, "graph", None), "outputs", ())
    return outputs[tensor.value_index] if tensor.value_index < len(outputs) else None
