"""The operations on pytrees of arrays, inside and outside of jit. Under jit each is one asynchronous call.

Every function takes a pytree whose leaves are arrays of any dtype of the core (bool, 8- to 64-bit integers, float16,
bfloat16, float32, float64; uint32, uint64, complex and float8 where data is only moved) and any shape, and returns a
pytree of the same structure. Under jit and its kin every rank must build the same calls; `name` ties calls together on
all ranks, and without it a name is made of the tree's paths, shapes and dtypes. Errors: TypeError for arguments of a
wrong type, ValueError for other wrong arguments, and those of horoclone.errors, at once; under jit what goes wrong when
the program runs arrives as jax.errors.JaxRuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horoclone import arrays, ops, runtime, tensor_names, weights
from horoclone.arguments import check, check_compression, given, root, wrong_type
from horoclone.errors import HorovodInternalError, Unsupported
from horoclone.jax import native
from horoclone.jax.call import NAMES, Call, is_tracing, name_for, paths_and_leaves
from horoclone.jax.compression import Compression, Compressor
from horoclone.jax.primitives import bind
from horoclone.jax.random_keys import with_keys, without_keys
from horoclone.jax.weighted import Weights, check_wires
from horoclone.process_sets import ProcessSet, global_process_set, set_id

Labels = Callable[[], Sequence[str]]

MOVABLE = {
    *ops.DTYPES, "uint32", "uint64", "complex64", "complex128",
    *(name for name in ops.MOVED if name.startswith("float8")),
}  # fmt: skip


def _call(
    tree: Any,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    labels: Any = None,
    **more: Any,
) -> Any:
    """Checks the leaves, names the call, binds it, and puts the results into the tree's structure. labels (a function,
    or None): what errors call the leaves, in place of their paths."""
    paths, leaves, structure = paths_and_leaves(tree)
    leaves = [_array(NAMES[op], path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if not leaves:
        return tree
    _check_dtypes(op, paths, leaves, labels)
    members = native.members_of(process_set)
    if name is None and (is_tracing() or more.get("is_step")):  # gradients of different parameters never meet
        alike = [value for key, value in sorted(more.items()) if key != "position"]
        name = name_for(op, paths, leaves, members, *alike)
    elif name is not None and not name:
        raise ValueError("an empty name; pass None for an unnamed operation")
    call = Call(op, name or "", members=members, **more)
    if not is_tracing():
        try:
            return jax.tree_util.tree_unflatten(structure, bind(leaves, call))
        except HorovodInternalError as error:
            error.name_tensors(labels() if labels else paths)
            raise
    tensor_names.remember(call.name, labels() if labels else paths)
    _refuse_local_devices(call)
    with jax.named_scope(f"horoclone.{NAMES[op]}.{call.name}"):  # what XLA's profiles and dumps show
        return jax.tree_util.tree_unflatten(structure, bind(leaves, call))


def _array(call: str, path: str, leaf: Any) -> Any:
    """The leaf as an array. TypeError for what JAX makes none of, OverflowError for integers that it would cut."""
    if isinstance(leaf, jax.Array):
        return leaf
    _refuse_to_cut(call, path, leaf)
    try:
        return jnp.asarray(leaf)
    except TypeError:
        where = f" at {path}" if path else ""
        raise TypeError(
            f"{call}: {_FIRST_ARGUMENT.get(call, 'tree')}={given(leaf)}{where} cannot be used; it takes an array, a "
            "number, or a pytree of them."
        ) from None


_FIRST_ARGUMENT = {"alltoall": "array"}


def _refuse_to_cut(call: str, path: str, leaf: Any) -> None:
    """Without jax_enable_x64 JAX makes 32-bit integers of NumPy's, whatever their values, and says nothing."""
    if (
        not isinstance(leaf, (np.ndarray, np.generic))
        or leaf.dtype not in (np.int64, np.uint64)
        or not leaf.size
    ):
        return
    kept = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if leaf.min() < kept.min or leaf.max() > kept.max:
        raise OverflowError(
            f"{call}: the array at {path or 'the root'} is {leaf.dtype} and has values outside of {kept.dtype}, which "
            "JAX makes of it. Use jax.config.update('jax_enable_x64', True), or horoclone's operations on NumPy arrays."
        )


def _check(call: str, process_set: ProcessSet, **more: Any) -> None:
    """TypeError for the first argument of a wrong type: which, what was given, and what is accepted."""
    check(call, **more)
    set_id(process_set)


def _check_dtypes(op: int, paths: Sequence[str], leaves: list[Any], labels: Labels | None) -> None:
    accepted = set(ops.DTYPES) if op in (ops.ALLREDUCE, ops.REDUCESCATTER) else MOVABLE
    for i, leaf in enumerate(leaves):
        if str(leaf.dtype) not in accepted:
            path = (labels() if labels else paths)[i]
            raise ValueError(
                f"{NAMES[op]}: the array at {path or 'the root'} is {leaf.dtype}[{','.join(map(str, leaf.shape))}]. "
                f"Accepted: {', '.join(sorted(accepted))}."
            )


def _refuse_local_devices(call: Call) -> None:
    """Inside pmap and shard_map every device of this process would make the call, under one name."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = {axis: mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ()) if mesh.shape[axis] > 1}
    if manual:
        raise Unsupported(
            f"{NAMES[call.op]} '{call.name}' inside shard_map or pmap over {manual} local devices: each would make the "
            "call. horoclone counts processes: reduce over the local devices first (jax.lax.psum), leave shard_map, "
            "and call it on the result; or start one process per device."
        )


def _members(process_set: ProcessSet) -> dict[str, int]:
    """Size and position, for operations whose results depend on them."""
    if process_set is global_process_set:
        return {"size": runtime.size(), "position": runtime.rank()}
    return {
        "size": process_set.size() or 1,
        "position": (process_set.rank() or 0) if process_set.included() else -1,
    }


def _with_rows(op: int) -> Callable[[str, Any], None]:
    def check(path: str, leaf: Any) -> None:
        if _array(NAMES[op], path, leaf).ndim == 0:
            raise ValueError(f"{NAMES[op]}: the array at {path or 'the root'} has no first dimension")

    return check


def _require_rows(op: int, tree: Any) -> None:
    for path, leaf in zip(*paths_and_leaves(tree)[:2], strict=True):
        _with_rows(op)(path, leaf)


def allreduce(
    tree: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ops.ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> Any:
    """Reduces every array of the tree over the ranks, all in one call; the same bits on every rank. Default: Average.

    Differentiable for Average and Sum (the gradient is the same reduction of the cotangents). vmap: the whole batch in
    one call. weight: how much this rank counts in the mean, sum(weight * array) / sum(weight): a number of 0 or more,
    also one that is computed in the program, given on every rank or on none. InvalidArgument on every rank (under jit
    JaxRuntimeError) where one's weight is negative or not finite, or all are 0.
    """
    _check(
        "allreduce",
        process_set,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    check_compression("allreduce", compression)
    reduce = ops.resolve_reduce(average, op)
    return _reduced(
        tree, name, compression, process_set, reduce, prescale_factor, postscale_factor, weight=weight
    )


def reduce_gradients(
    tree: Any,
    name: str | None,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: Any = None,
    labels: Labels | None = None,
) -> Any:
    """As allreduce, in an optimizer's step: Mismatch where a rank has left one out that others have made. labels: what
    errors call the leaves."""
    return _reduced(
        tree,
        name,
        compression,
        process_set,
        op,
        prescale_factor,
        postscale_factor,
        is_step=True,
        weight=weight,
        labels=labels,
    )


def _reduced(
    tree: Any,
    name: str | None,
    compression: type[Compressor],
    process_set: ProcessSet,
    reduce: int,
    prescale: float,
    postscale: float,
    is_step: bool = False,
    weight: Any = None,
    labels: Labels | None = None,
) -> Any:
    paths, leaves, structure = paths_and_leaves(tree)
    leaves = [_array("allreduce", path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    pressed = [compression.compress(leaf) for leaf in leaves]
    small = jax.tree_util.tree_unflatten(structure, [array for array, _ in pressed])
    scales = {"prescale": float(prescale), "postscale": float(postscale)}
    if weight is None or not leaves:
        reduced = _call(
            small, ops.ALLREDUCE, name, process_set, labels, reduce=reduce, **scales, is_step=is_step
        )
        back = jax.tree_util.tree_leaves(reduced)
    else:
        weights.check_mean("allreduce", reduce, (prescale, postscale))
        check_wires("allreduce", leaves, [array for array, _ in pressed])
        wires = [array for array, _ in pressed]
        back = _weighted(wires, paths, name, process_set, is_step, weight, labels or (lambda: paths))
    restored = [compression.decompress(array, kept) for array, (_, kept) in zip(back, pressed, strict=True)]
    return jax.tree_util.tree_unflatten(structure, restored)


def _weighted(
    leaves: list[Any],
    paths: list[str],
    name: str | None,
    process_set: ProcessSet,
    is_step: bool,
    weight: Any,
    labels: Labels,
) -> list[Any]:
    """The name is that of the call without weights, which must not wait for one with them."""
    if name is None and (is_tracing() or is_step):
        terms = {"is_step": is_step, "postscale": 1.0, "prescale": 1.0, "reduce": ops.Average}
        alike = [value for _, value in sorted(terms.items())]
        name = name_for(ops.ALLREDUCE, paths, leaves, native.members_of(process_set), *alike)
    members = _members(process_set)
    ranks = process_set.ranks or list(range(members["size"]))
    own = Weights("allreduce", weight, ranks, members["position"])
    weighed = own.weigh(leaves)
    received = _call(weighed, ops.ALLREDUCE, name, process_set, labels, reduce=ops.Sum, is_step=is_step)
    return own.divide(received, leaves, name)


def broadcast(
    tree: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns every array as rank root_rank (a world rank, also in a process set) has it, all in one call.

    Random keys (jax.random.key) among them become the root's.

    Differentiable: the root gets the average of the cotangents, as in Horovod, the others zeros.
    """
    _check("broadcast", process_set, name=name)
    bare = without_keys(tree)
    found = _call(bare, ops.BROADCAST, name, process_set, root=root("broadcast", root_rank))
    return with_keys(tree, found)


def allgather(tree: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns every rank's rows, in rank order. Arrays may differ in the first dimension, but not under jit.

    Differentiable: the gradient is a reducescatter (Average) of the cotangents.
    """
    _check("allgather", process_set, name=name)
    _require_rows(ops.ALLGATHER, tree)
    return _call(tree, ops.ALLGATHER, name, process_set, **_members(process_set))


def reducescatter(
    tree: Any,
    name: str | None = None,
    op: ops.ReduceOp | int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces (Average or Sum) and gives each rank its share of the rows; the first ranks one row more if uneven.

    Differentiable where the rows divide evenly: the gradient is an allgather of the cotangents.
    """
    _check(
        "reducescatter",
        process_set,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    _require_rows(ops.REDUCESCATTER, tree)
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    reduce = ops.resolve_reduce(None, op)
    return _call(tree, ops.REDUCESCATTER, name, process_set, reduce=reduce, **scales, **_members(process_set))


def alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends equal shares of the rows to each rank and returns the rows received, in rank order; one array.

    With `splits` (rows for each rank; not under jit, where sizes must be known): (rows, received_splits as int32).
    Differentiable without splits: the gradient is an alltoall of the cotangents.
    """
    _check("alltoall", process_set, name=name)
    _require_rows(ops.ALLTOALL, array)
    if splits is not None:
        if is_tracing():
            raise Unsupported(
                "alltoall with splits under jit: how much is received is not known when the program is built. Pad the "
                "rows to equal shares and leave splits out, or call it outside jit."
            )
        check("alltoall", splits=splits)
        rows, received = arrays.alltoall(array, splits, name, process_set)
        # More rows than an int32 says stay NumPy's: JAX would make an int32 of them.
        return jnp.asarray(rows), received if received.dtype.itemsize == 8 else jnp.asarray(received)
    leaves = jax.tree_util.tree_leaves(array)
    if len(leaves) != 1:
        raise wrong_type("alltoall", "array", array, f"one array, not a tree of {len(leaves)}")
    members = _members(process_set)
    if leaves[0].shape[0] % members["size"]:
        raise ValueError(
            f"alltoall: first dimension {leaves[0].shape[0]} is not divisible by the number of ranks "
            f"{members['size']}; pass splits"
        )
    return _call(array, ops.ALLTOALL, name, process_set, **members)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it. Not under jit, where it would have no place."""
    if is_tracing():
        raise Unsupported(
            "barrier() under jit has no place among operations that depend on data only; call it outside, or let later "
            "operations use the result of an allreduce."
        )
    arrays.barrier(process_set)
