"""The collectives as TensorFlow ops, eagerly and in graphs, one function per op; and the topology.

An op is matched across ranks by its name. In a graph that is the node's name, by default made from the input's name;
run eagerly, it is the argument `name`, and ops without one are matched by their order. Inputs: bool, uint8, int8,
uint16, int16, int32, int64, float16, bfloat16, float32, float64. Errors, when the op runs:
tf.errors.FailedPreconditionError (ranks disagree, no init, or not supported), InvalidArgumentError (wrong arguments),
UnknownError (a rank was lost, or the job given up); ValueError at once for an unknown process set.
"""

from __future__ import annotations

import array
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import tensorflow as tf

from horoclone import ops, tensor_names
from horoclone.arguments import SPLITS, check, given, refuse_mask, root, wrong_type
from horoclone.common.basics import HorovodBasics
from horoclone.errors import Unsupported
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.ops import REDUCE_NAMES, Adasum, Average, Sum
from horoclone.process_sets import ProcessSet, global_process_set, id_of
from horoclone.runtime import exported, steps
from horoclone.runtime.exported import *  # noqa: F403 - topology, process sets, init() and shutdown()
from horoclone.runtime.joining_rank import check as check_joining_rank
from horoclone.tensorflow.library import functions

__all__ = [
    *ops.__all__, *exported.__all__, "allgather", "alltoall", "broadcast", "grouped_allgather", "join",
    "local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

_basics = HorovodBasics()  # a private name that many scripts know


def _as_it_is(function: Function) -> Function:
    """AutoGraph would rewrite these functions while it traces the user's; there is nothing to rewrite. The mark says so
    as TensorFlow's do_not_convert() does, whose wrapper would hide defaults and code, which libraries look at."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


_GUARD = "_horoclone_guard"
_eager_guard: Any = None


def _guard() -> Any:
    """An input that TensorFlow does not compute in advance, as it comes from a stateful op, one in each graph. Without
    it an op with constant inputs would be run once, while the graph is optimised, and never again."""
    global _eager_guard
    if tf.executing_eagerly():
        if _eager_guard is None:
            with tf.device("CPU:0"):
                _eager_guard = tf.constant(0)
        return _eager_guard
    graph: Any = tf.compat.v1.get_default_graph()
    guard = getattr(graph, _GUARD, None)
    if guard is None:
        with tf.control_dependencies(None), tf.device("CPU:0"):
            guard = functions.horovod_guard(name="horoclone_guard")
        setattr(graph, _GUARD, guard)
    return guard


def _guard_with(name: str, factors: Sequence[float]) -> Any:
    """A guard with the name and the factors, if they are not 1, of an op that is run eagerly. Attributes would stay for
    ever: TensorFlow keeps a kernel for each value of one."""
    text = name.encode()
    more = array.array("d", factors if any(factor != 1 for factor in factors) else ())
    with tf.device("CPU:0"):
        numbers = array.array("i", text + bytes(-len(text) % 4) + more.tobytes())
        return tf.constant([len(text), *numbers], tf.int32)


def factors_of(op: Any) -> tuple[float, float]:
    """prescale_factor and postscale_factor of an op, to its gradient."""
    guard = op.inputs[-1]
    if isinstance(guard, tf.__internal__.EagerTensor) and guard.shape.rank == 1:
        numbers = guard.numpy()
        pre, post = array.array("d", numbers[1 - (-int(numbers[0]) // 4) :].tobytes()) or (1.0, 1.0)
    else:
        pre, post = (float.fromhex(op.get_attr(f"{when}scale_factor").decode()) for when in ("pre", "post"))
    return pre, post


def _refuse_xla() -> None:
    """Unsupported inside tf.function(jit_compile=True), where TensorFlow would only say that there is no kernel."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise Unsupported(
                    "collectives cannot run in a function that XLA compiles. Use tf.function(jit_compile=False), or "
                    "model.compile(..., jit_compile=False) in Keras; or reduce outside of the compiled function."
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def _node_name(kind: str, source: str) -> str:
    """What an op without a name is called, made from its input's name. An eager tensor that a function captures is
    called by a number that differs between ranks: then the order in which the graph is built decides alone."""
    if re.fullmatch(r"\d+(_\d+)?(:\d+)?", source.rpartition("/")[2]):
        return kind
    return f"{kind}_{re.sub('[^a-zA-Z0-9_]', '_', source)}"


def _run(
    call: str,
    given: Any,
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
    factors: tuple[float, float] | None = None,
    **more: Any,
) -> Any:
    """The one way to the ops: runs one, or adds it to the graph. given: a tensor, or those of a group, of which there
    may be none. factors: prescale and postscale, of those that reduce. TypeError for arguments of a wrong type."""
    is_group = call.startswith("grouped_")
    if is_group and not given:
        return []
    if factors is not None:
        check("reduction", prescale_factor=factors[0], postscale_factor=factors[1])
    pre, post = map(float, factors or (1.0, 1.0))
    check(call, name=name)
    tensors = given if is_group else [given]
    _refuse_dtypes(call, tensors, _MOVABLE if factors is None else ops.DTYPES)
    kind = "Horovod" + "".join(word.capitalize() for word in call.split("_"))
    eager = tf.executing_eagerly()
    more |= {"tensors" if is_group else "tensor": given, "ignore_name_scope": ignore_name_scope}
    if eager:
        check_joining_rank(name or kind)
        is_plain = not name and pre == post == 1.0
        more |= {"guard": _guard() if is_plain else _guard_with(name or "", (pre, post)), "label": name or ""}
    else:
        _refuse_xla()
        if name is None:
            name = _node_name(kind, tensors[0].name)
        # The attribute is not the key in a graph. It makes the node unlike all others: equal ones would be merged.
        unique = tf.compat.v1.get_default_graph().unique_name(name, mark_as_used=False)
        more |= {"guard": _guard(), "tensor_name": unique, "name": name}
        if factors is not None:
            more |= {"prescale_factor": pre.hex(), "postscale_factor": post.hex()}
    return getattr(functions, f"horovod_{call}")(process_set_id=id_of(process_set), **more)


def naming(name: str | None, tensors: Callable[[], Sequence[str]]) -> AbstractContextManager[None]:
    """Around a grouped operation with gradients of these variables: its errors name them, now and when the graph runs.
    name: its own; None: its errors in a graph do not."""
    if name is not None and not tf.executing_eagerly():
        graph: Any = tf.compat.v1.get_default_graph()
        tensor_names.remember(graph.unique_name(name, mark_as_used=False), tensors())
    return tensor_names.called(tensors)


_MOVABLE = {
    *ops.DTYPES, "uint32", "uint64", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e4m3b11fnuz", "float8_e5m2fnuz",
}  # fmt: skip


class WrongDtype(tf.errors.InvalidArgumentError, TypeError):
    """A tensor that no operation takes: TensorFlow's error of an eager operation, and that of a graph."""


def _refuse_dtypes(call: str, tensors: Sequence[Any], accepted: Iterable[str]) -> None:
    for name in {tensor.dtype.base_dtype.name for tensor in tensors}.difference(accepted):
        text = f"Tensor type {name} is not supported, only {', '.join(sorted(accepted))}. Convert it first."
        raise WrongDtype(None, None, f"{call}: {text}")


class WrongReduction(tf.errors.UnknownError, ValueError):
    """A reduction that does not exist, or not for these tensors. Horovod says UnknownError; it is a wrong argument."""


def _refuse_adasum_of_integers(op: int, tensors: Sequence[Any]) -> None:
    if op == Adasum and not all(tensor.dtype.is_floating for tensor in tensors):
        raise WrongReduction(None, None, "op=hvd.Adasum reduces floating-point tensors only; use hvd.Sum.")


def _refuse_reduction(kind: str, op: int) -> None:
    """Here and not in the op: a session of TensorFlow 1 would take AbortedError for a preemption and start over."""
    if op not in (Average, Sum):
        text = f"{kind} with op=hvd.{REDUCE_NAMES[op]} is not possible; use hvd.Average or hvd.Sum."
        raise tf.errors.AbortedError(None, None, text)


def _refuse_scalars(kind: str, tensors: Sequence[Any], eager_too: bool = False) -> None:
    """There must be rows. In a graph ValueError says so when the op is made, as with Horovod. Run eagerly, most ops say
    so on every rank; for the others this does."""
    eager = tf.executing_eagerly()
    if (eager and not eager_too) or not any(tensor.shape.rank == 0 for tensor in tensors):
        return
    text = f"{kind} needs a tensor with a first dimension, not a scalar; use tf.reshape(tensor, [1])."
    raise tf.errors.InvalidArgumentError(None, None, text) if eager else ValueError(text)


def to_tensor(call: str, value: Any) -> Any:
    """The value as a tensor; TensorFlow's own error otherwise, with the call and what it was given."""
    refuse_mask(value)
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        text = f"{call}: tensor={given(value)} cannot be made a tf.Tensor: {error}"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(text) from error


def group_of(call: str, values: Any) -> list[Any]:
    """The tensors of a group. TypeError for one tensor, which would be cut into rows, and for what is no sequence."""
    if isinstance(values, (str, bytes)) or tf.is_tensor(values) or not hasattr(values, "__iter__"):
        raise wrong_type(call, "tensors", values, "a list or tuple of tensors")
    return list(values)


def _tensors(call: str, values: Any) -> list[Any]:
    return [to_tensor(call, value) for value in group_of(call, values)]


def _splits(splits: Any) -> Any:
    """As a tensor of int32; one that is a tensor already is TensorFlow's to judge."""
    if tf.is_tensor(splits):
        return splits
    check("alltoall", splits=splits)
    if splits is None:
        return tf.constant([], tf.int32)
    try:
        return tf.convert_to_tensor(list(splits), tf.int32)
    except (TypeError, ValueError):
        raise wrong_type("alltoall", "splits", splits, SPLITS) from None


# --- allreduce -----------------------------------------------------------------------------------------------------


@_as_it_is
def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: ops.ReduceOp | int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces tensors of one shape and dtype over all ranks. Differentiable for Sum and Average."""
    tensor = to_tensor("allreduce", tensor)
    _refuse_adasum_of_integers(op, [tensor])
    factors = (prescale_factor, postscale_factor)
    return _run("allreduce", tensor, name, ignore_name_scope, process_set, factors, reduce_op=op)


@_as_it_is
def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ops.ReduceOp | int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces several tensors, of any shapes and dtypes, as one operation."""
    tensors = _tensors("grouped_allreduce", tensors)
    _refuse_adasum_of_integers(op, tensors)
    factors = (prescale_factor, postscale_factor)
    return _run("grouped_allreduce", tensors, name, ignore_name_scope, process_set, factors, reduce_op=op)


# --- allgather -----------------------------------------------------------------------------------------------------


@_as_it_is
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be one.

    Differentiable: each rank gets the average over the ranks of the gradients of its rows, as in Horovod.
    """
    tensor = to_tensor("allgather", tensor)
    _refuse_scalars("allgather", [tensor])
    return _run("allgather", tensor, name, ignore_name_scope, process_set)


@_as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gathers several tensors over the ranks as one operation; see allgather."""
    tensors = _tensors("grouped_allgather", tensors)
    _refuse_scalars("grouped_allgather", tensors)
    return _run("grouped_allgather", tensors, name, ignore_name_scope, process_set)


# --- broadcast -----------------------------------------------------------------------------------------------------


@_as_it_is
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns rank root_rank's tensor (a world rank) on every rank. Differentiable: the root gets the average of the
    ranks' gradients, as in Horovod, the others zeros."""
    tensor = to_tensor("broadcast", tensor)
    number = root("broadcast", root_rank)
    return _run("broadcast", tensor, name, ignore_name_scope, process_set, root_rank=number)


@_as_it_is
def _grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """broadcast of several tensors as one operation."""
    tensors = _tensors("grouped_broadcast", tensors)
    number = root("grouped_broadcast", root_rank)
    return _run("grouped_broadcast", tensors, name, ignore_name_scope, process_set, root_rank=number)


def native_of(variable: Any) -> Any:
    """The tf.Variable in a variable of Keras 3; a tf.Variable as it is."""
    inner = getattr(variable, "value", None)
    return inner if not isinstance(variable, tf.Variable) and isinstance(inner, tf.Variable) else variable


def _is_resource(variable: Any) -> bool:
    return variable.dtype == tf.resource or hasattr(variable, "handle")


def _assign(variable: Any, value: Any) -> Any:
    """In a graph the op; eagerly the variable."""
    if not _is_resource(variable):
        return tf.compat.v1.assign(variable, value)
    return variable.assign(value)


@_as_it_is
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gives the variables rank root_rank's values, in place and as one operation. Returns them, updated (in a graph:
    tensors to run).

    ValueError when resource variables and reference variables (of TensorFlow 1) are mixed.
    """
    plain = [native_of(variable) for variable in variables]
    if len({_is_resource(variable) for variable in plain}) > 1:
        raise ValueError("broadcast_: resource variables and reference variables cannot be mixed in one call")
    values = [variable.read_value() for variable in plain]
    received = _grouped_broadcast(values, root_rank, name, process_set=process_set)
    return [_assign(variable, value) for variable, value in zip(plain, received, strict=True)]


# --- alltoall and reducescatter ------------------------------------------------------------------------------------


@_as_it_is
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends splits[r] rows of `tensor` to each rank r (equal shares without splits) and concatenates what arrives.

    splits: 1-d, one number for each rank of the set; a tensor must be int32, or TensorFlow refuses it as an argument
    of the op (InvalidArgumentError, in a graph TypeError). Returns the output, and with `splits` also the rows
    received from each rank (int32). Differentiable.
    """
    tensor = to_tensor("alltoall", tensor)
    _refuse_scalars("alltoall", [tensor])
    rows = _splits(splits)
    output, received = _run("alltoall", tensor, name, ignore_name_scope, process_set, splits=rows)
    return output if splits is None else (output, received)


@_as_it_is
def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: ops.ReduceOp | int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces (Sum or Average) and gives each rank its share of the rows; the first ranks get one more if uneven.

    tf.errors.AbortedError at once for other reductions, as in Horovod."""
    tensor = to_tensor("reducescatter", tensor)
    _refuse_reduction("reducescatter", op)
    _refuse_scalars("reducescatter", [tensor], eager_too=True)
    factors = (prescale_factor, postscale_factor)
    return _run("reducescatter", tensor, name, ignore_name_scope, process_set, factors, reduce_op=op)


@_as_it_is
def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ops.ReduceOp | int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """reducescatter of several tensors as one operation."""
    tensors = _tensors("grouped_reducescatter", tensors)
    if not tensors:
        return []
    _refuse_reduction("grouped_reducescatter", op)
    _refuse_scalars("grouped_reducescatter", tensors, eager_too=True)
    factors = (prescale_factor, postscale_factor)
    return _run("grouped_reducescatter", tensors, name, ignore_name_scope, process_set, factors, reduce_op=op)


# --- join, and topology that is read when the op runs -----------------------------------------------------------------


@_as_it_is
def join() -> Any:
    """Says that this rank has no more data, and waits until every rank has said so; gives the rank that joined last
    (int32). Meanwhile this rank takes part in the others' allreduces with identity elements."""
    last = functions.horovod_join()
    steps.restart()  # in a function: when it is traced
    return last


@_as_it_is
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the number of ranks in the process set, read each time the op runs (int32)."""
    return functions.horovod_size(process_set_id=process_set_id, name=name)


@_as_it_is
def rank_op(name: str | None = None) -> Any:
    """Returns this process's number, read each time the op runs (int32)."""
    return functions.horovod_rank(name=name)


@_as_it_is
def process_set_rank_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """This process's place in the process set, -1 when it is no member; read each time the op runs (int32)."""
    return functions.horovod_rank(process_set_id=process_set_id, name=name)


@_as_it_is
def local_size_op(name: str | None = None) -> Any:
    """Returns the number of ranks on this host, read each time the op runs (int32)."""
    return functions.horovod_local_size(name=name)


@_as_it_is
def local_rank_op(name: str | None = None) -> Any:
    """Returns this process's number on its host, read each time the op runs (int32)."""
    return functions.horovod_local_rank(name=name)


@_as_it_is
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns 1 when this process belongs to the process set, else 0; read each time the op runs (int32)."""
    return functions.horovod_process_set_included(process_set_id=process_set_id, name=name)
