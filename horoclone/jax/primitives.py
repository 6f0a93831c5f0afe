"""The one JAX primitive behind every operation, with its rules: shapes, lowering, derivatives, batching.

A call carries any number of arrays and becomes one asynchronous custom call in XLA. Derivatives are those of linear
maps: the transpose of a broadcast is a sum on its root, and so on, with Horovod's factors.
Thread: whichever traces.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from horoclone import ops, runtime
from horoclone.errors import Unsupported
from horoclone.jax import eager, native
from horoclone.jax.call import NAMES, SELF_TEST, VISIT, Call, rows_of
from horoclone.jax.failures import horovod_error_of
from horoclone.jax.finishing import builders

collective_p = Primitive("horoclone_collective")
collective_p.multiple_results = True


def bind(arrays: Sequence[Any], call: Call) -> list[Any]:
    """Adds the call to the program that is being traced; runs it at once when none is."""
    return list(collective_p.bind(*arrays, call=call))


def _loopback(arrays: Sequence[Any], root: int) -> list[Any]:
    return bind(arrays, Call(SELF_TEST, "self-test", root=root))


# --- shapes ----------------------------------------------------------------------------------------------------------


def _result_shape(shape: tuple[int, ...], call: Call) -> tuple[int, ...]:
    if call.op == ops.ALLGATHER:
        return (shape[0] * call.size, *shape[1:])
    if call.op == ops.REDUCESCATTER:
        return (rows_of(shape[0], call.size, call.position), *shape[1:])
    return shape


def _abstract(*avals: Any, call: Call) -> list[Any]:
    return [jax.core.ShapedArray(_result_shape(aval.shape, call), aval.dtype) for aval in avals]


collective_p.def_abstract_eval(_abstract)


def _run_now(*arrays: Any, call: Call) -> list[Any]:
    """Outside of programs. On a GPU the call becomes a program of its own, and returns when its results are there;
    allgather and alltoall, to which every rank may give another number of rows, pass host memory."""
    if call.op in (ops.ALLGATHER, ops.ALLTOALL) or not eager.all_on_one_gpu(arrays):
        return eager.run(arrays, call)
    try:
        return list(jax.block_until_ready(_program_for(call)(*arrays)))
    except (RuntimeError, ValueError) as error:
        if (found := horovod_error_of(error)) is None:
            raise
        raise found from error


@functools.lru_cache(maxsize=1024)
def _program_for(call: Call) -> Any:
    return jax.jit(lambda *arrays: collective_p.bind(*arrays, call=call))


collective_p.def_impl(_run_now)


# --- lowering --------------------------------------------------------------------------------------------------------


class _Program:
    """The number of an XLA program of this process, kept with the module that becomes it."""

    numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self.numbers)


def _program_of(module: Any) -> int:
    """A number of the program that is being lowered: it tells the handlers which call sites belong together."""
    for kept in module.keepalives:
        if isinstance(kept, _Program):
            return kept.number
    program = _Program()
    module.add_keepalive(program)
    return program.number


def _refuse_several_devices(module: Any, call: Call) -> None:
    """XLA would make the call once for each device, under one name."""
    devices = getattr(module.axis_context, "num_devices", None)
    if devices is None and hasattr(module.axis_context, "mesh"):
        devices = module.axis_context.mesh.size
    if devices and devices > 1:
        raise Unsupported(
            f"{NAMES[call.op]} '{call.name}' in a program over {devices} devices of this process: each would make the "
            "call. horoclone counts processes: start one per device, or reduce over the local devices first "
            "(jax.lax.psum) and call it in a program of one device."
        )


def lowering(target: str, check: Callable[[], None] | None = None) -> Callable[..., Any]:
    """The rule that makes a call a custom call of XLA's to `target`. check: made before the first program is built."""
    to_call = jax.ffi.ffi_lowering(target, has_side_effect=True)
    to_visit = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases={0: 0})

    def lower(context: Any, *operands: Any, call: Call) -> Any:
        if call.op != SELF_TEST:
            if check is not None:
                check()
            _refuse_several_devices(context.module_context, call)
            builders.add(threading.get_ident())
        said = {
            "reduce": np.int32(call.reduce),
            "root": np.int32(call.root),
            "program": np.int64(_program_of(context.module_context)),
            "prescale": np.float64(call.prescale),
            "postscale": np.float64(call.postscale),
            "name": call.name,
            "members": call.members,
        }
        if call.is_step and (branch := _branch_around()) is not None:
            with ir.InsertionPoint(branch):
                arm = [jax.core.ShapedArray((), np.int32)]
                visit = context.replace(avals_in=arm, avals_out=arm)
                branch.operands[0] = to_visit(visit, branch.operands[0], op=np.int32(VISIT), **said)[0]
        return to_call(context, *operands, op=np.int32(call.op), **said)

    return lower


def _branch_around() -> Any:
    """The outermost lax.cond or lax.switch in whose arm something is being lowered, within the innermost loop."""
    found, operation = None, ir.InsertionPoint.current.block.owner.operation
    while operation.name not in ("stablehlo.while", "func.func"):
        found = operation if operation.name == "stablehlo.case" else found
        operation = operation.parent.operation
    return found


def _lower_elsewhere(context: Any, *operands: Any, call: Call) -> Any:
    raise Unsupported(
        f"{NAMES[call.op]} '{call.name}' inside a program for {context.module_context.platforms}: this version "
        "runs in programs for the CPU and for NVIDIA's GPUs. Call it outside jit, where arrays are copied to the host, "
        "or set JAX_PLATFORMS=cpu."
    )


def _keep_unused(*given: Any) -> tuple[list[bool], Any]:
    """A call whose results this rank does not use stays in the program: the other ranks may use theirs. The equation
    comes last; what is used of its results before it, and from JAX 0.12 on which of its inputs are."""
    equation = given[-1]
    return [True] * len(equation.invars), equation


pe.dce_rules[collective_p] = _keep_unused
# Lowered where it stands, and so are branches: else _branch_around() would see a function that JAX makes of each.
_in_place: dict[str, Any] = (
    {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
)
mlir.register_lowering(
    collective_p, lowering(native.TARGET, lambda: native.check(_loopback)), platform="cpu", **_in_place
)
mlir.register_lowering(collective_p, lowering(native.TARGET), platform="cuda", **_in_place)
mlir.register_lowering(collective_p, _lower_elsewhere)
if _in_place and (_of_branches := getattr(mlir, "_lowerings", {}).get(jax.lax.cond_p)) is not None:
    mlir.register_lowering(jax.lax.cond_p, _of_branches.rule, **_in_place)


# --- derivatives -----------------------------------------------------------------------------------------------------


def _require_linear(call: Call) -> None:
    if call.op in (ops.ALLREDUCE, ops.REDUCESCATTER) and call.reduce not in (ops.Average, ops.Sum):
        raise Unsupported(
            f"{NAMES[call.op]} '{call.name}' with op={ops.REDUCE_NAMES[call.reduce]} has no gradient here: only "
            "Average and Sum are linear. Use jax.lax.stop_gradient on its argument if the gradient is not wanted."
        )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    _require_linear(call)
    results = collective_p.bind(*primals, call=call)
    # Integers have no tangents; every other argument takes part on every rank, zero or not.
    moving = [i for i, primal in enumerate(primals) if jnp.issubdtype(jax.typeof(primal).dtype, jnp.inexact)]
    filled = [ad.instantiate_zeros(tangents[i]) for i in moving]
    out: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if filled:
        pushed = collective_p.bind(*filled, call=replace(call, name=f"{call.name}.jvp"))
        for i, tangent in zip(moving, pushed, strict=True):
            out[i] = tangent
    return results, out


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    filled = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    shapes = [operand.aval.shape for operand in operands]
    gradients = transposed(filled, replace(call, name=call.name.removesuffix(".jvp") + ".grad"), shapes)
    # A known operand has no gradient, yet takes part: on another rank it may not be known.
    return [g if ad.is_undefined_primal(o) else None for g, o in zip(gradients, operands, strict=True)]


def transposed(cotangents: list[Any], call: Call, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Horovod's gradients. allgather and broadcast average over the ranks, as the losses of data parallelism do."""
    if call.op == ops.ALLREDUCE:
        return collective_p.bind(*cotangents, call=call)
    if call.op == ops.ALLTOALL:
        return collective_p.bind(*cotangents, call=call)
    if call.op == ops.BROADCAST:
        everybody = replace(call, op=ops.ALLREDUCE, reduce=ops.Average, root=0)
        *reduced, one = collective_p.bind(*cotangents, jnp.ones((), cotangents[0].dtype), call=everybody)
        # XLA must not find out who is the root: on the others it would run what follows, and calls in it, before this.
        is_root = one < (2 if call.root == runtime.rank() else -1)
        return [jnp.where(is_root, r, jnp.zeros_like(r)) for r in reduced]
    if call.op == ops.ALLGATHER:
        reduce = ops.Sum if call.is_gradient else ops.Average
        share = replace(call, op=ops.REDUCESCATTER, reduce=reduce, is_gradient=True)
        return collective_p.bind(*cotangents, call=share)
    factor = call.prescale * call.postscale * (call.size if call.reduce == ops.Sum else 1)
    if call.is_gradient:
        factor /= call.size
    whole = replace(call, op=ops.ALLGATHER, reduce=ops.Sum, prescale=1.0, postscale=1.0, is_gradient=True)
    scaled = [c if factor == 1 else c * jnp.asarray(factor, c.dtype) for c in cotangents]
    if any(shape[0] % call.size for shape in shapes):
        raise Unsupported(
            f"reducescatter '{call.name}': rows {[shape[0] for shape in shapes]} do not divide by {call.size} ranks, "
            "and the gradient of an uneven reducescatter is not available under jax; pad the rows."
        )
    return collective_p.bind(*scaled, call=whole)


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose


# --- batching --------------------------------------------------------------------------------------------------------


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    """One call for the whole batch. Operations on rows keep axis 0 for them and take the batch as axis 1; of Adasum,
    which looks at whole arrays, each example is an array."""
    if call.op == ops.ALLREDUCE and call.reduce == ops.Adasum:
        return _batch_of_arrays(arrays, dims, call)
    by_rows = call.op in (ops.ALLGATHER, ops.REDUCESCATTER, ops.ALLTOALL)
    if by_rows:
        moved = [
            array if dim is None else jnp.moveaxis(array, dim, 1)
            for array, dim in zip(arrays, dims, strict=True)
        ]
        dims = [dim if dim is None else 1 for dim in dims]
    else:
        moved = list(arrays)
    return collective_p.bind(*moved, call=call), list(dims)


def _batch_of_arrays(arrays: Sequence[Any], dims: Sequence[Any], call: Call) -> tuple[list[Any], list[Any]]:
    """Of a batch of none, the empty array takes part."""
    moved = [a if dim is None else jnp.moveaxis(a, dim, 0) for a, dim in zip(arrays, dims, strict=True)]
    split = [dim is not None and len(array) > 0 for array, dim in zip(moved, dims, strict=True)]
    examples = [list(array) if is_split else [array] for array, is_split in zip(moved, split, strict=True)]
    found = iter(collective_p.bind(*itertools.chain(*examples), call=call))
    results = [list(itertools.islice(found, len(some))) for some in examples]
    batched = [
        jnp.stack(some) if is_split else some[0] for some, is_split in zip(results, split, strict=True)
    ]
    return batched, [dim if dim is None else 0 for dim in dims]


batching.primitive_batchers[collective_p] = _batch
