"""An argument of the wrong type: every public operation says which one it is, what was given, and what is accepted."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from world import ranks

import horoclone as hvd
import horoclone.torch as torch_hvd

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


class Odd:
    """Of no type that anybody accepts."""

    def __repr__(self) -> str:
        return "<Odd>"


# A wrong value for each argument, as it is shown, and what the text says is accepted.
WRONG: dict[str, tuple[Any, str, str]] = {
    "name": (3, "3 (an int)", "a str, or None"),
    "average": ("grad", "'grad' (a str)", "True, False or None"),
    "op": ("sum", "'sum'", "hvd.Sum"),
    "prescale_factor": ("2", "'2' (a str)", "a number"),
    "postscale_factor": ([1.0], "[1.0] (a list)", "a number"),
    "process_set": ([0], "[0]", "ProcessSet"),
    "compression": ("fp16", "'fp16' (a str)", "Compression.fp16"),
    "root_rank": ("0", "'0' (a str)", "rank of a process"),
    "splits": (5, "5 (an int)", "integers, one for each rank"),
    "priority": (1.5, "1.5 (a float)", "an integer"),
    "tag": ("a", "'a' (a str)", "an integer"),
    "dst": ("a", "'a'", "rank of a process"),
    "src": (1.5, "1.5", "rank of a process"),
    "device": ("gpu", "'gpu' (a str)", "number of a GPU"),
    "handle": (["h"], "['h'] (a list)", "_async"),
    "tensors": (7, "7 (an int)", "list or tuple"),
    "arrays": (7, "7 (an int)", "list or tuple"),
}
# What Python casts without a word where nobody looks: all of them are as wrong.
CAST: dict[str, tuple[Any, ...]] = {
    "root_rank": (True, False, 0.0, 1.7, np.float32(0), np.bool_(False), None, 0j, np.array([0.0])),
    "prescale_factor": (
        True, np.bool_(True), 1j, np.complex64(1), float("nan"), np.float32("nan"), 10**400, None, b"1"
    ),
    "postscale_factor": (False, np.complex128(1), float("nan"), "nan", np.ones(2)),
    "priority": (True, 1.0, np.float32(1), 10**30),
    "tag": (True, 1.0, np.float64(1)),
    "device": (True, 1.0),
    "splits": ([1.5], [True], [np.float32(1)], "11", ["1"]),
    "name": (b"x", 1.5, True),
}  # fmt: skip
REDUCTION = ("average", "name", "op", "prescale_factor", "postscale_factor", "process_set")
SHARE = ("name", "op", "prescale_factor", "postscale_factor", "process_set")
ROOTED = ("root_rank", "name", "process_set")


def calls_of(
    prefix: str, suffixes: tuple[str, ...], arguments: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    return {prefix + suffix: arguments for suffix in suffixes}


FOUR = ("", "_", "_async", "_async_")
TWO = ("", "_async")


def check(
    module: Any, calls: Mapping[str, tuple[str, ...]], given: Mapping[str, Callable[[], dict[str, Any]]]
) -> None:
    """Each call with each of its arguments wrong, all others right. given: right arguments by the call's first word."""
    for name, arguments in calls.items():
        function = getattr(module, name)
        kind = max((word for word in given if name.startswith(word)), key=len)
        for argument in arguments:
            value, shown, accepted = WRONG[argument]
            try:
                function(**{**given[kind](), argument: value})
            except (TypeError, ValueError, hvd.HorovodInternalError) as error:
                text = str(error)
                assert f"{argument}=" in text or argument in ("op",), f"{name}: which argument? {text}"
                assert shown in text, f"{name}({argument}=...): what was given? {text}"
                assert accepted in text, f"{name}({argument}=...): what is accepted? {text}"
            else:
                raise AssertionError(f"{name}({argument}={value!r}) was accepted")
            for other in CAST.get(argument, ()):
                try:
                    function(**{**given[kind](), argument: other})
                except (TypeError, ValueError, hvd.HorovodInternalError) as error:
                    assert argument in str(error), f"{name}({argument}={other!r}): {error}"
                else:
                    raise AssertionError(f"{name}({argument}={other!r}) was accepted")


ARRAYS = {
    **calls_of("allreduce", FOUR, REDUCTION),
    **calls_of("allreduce_async", ("", "_"), ("priority",)),
    **calls_of("grouped_allreduce", FOUR, (*REDUCTION, "arrays")),
    **calls_of("allgather", TWO, ("name", "process_set")),
    **calls_of("grouped_allgather", TWO, ("name", "process_set", "arrays")),
    **calls_of("broadcast", FOUR, ROOTED),
    **calls_of("alltoall", TWO, ("splits", "name", "process_set")),
    **calls_of("reducescatter", TWO, SHARE),
    **calls_of("grouped_reducescatter", TWO, (*SHARE, "arrays")),
    **calls_of("reduce", FOUR, (*ROOTED, "op", "prescale_factor", "postscale_factor")),
    **calls_of("gather", TWO, ROOTED),
    **calls_of("scatter", TWO, (*ROOTED, "splits")),
    "send": ("dst", "tag", "process_set"), "isend": ("dst", "tag", "process_set"),
    "recv": ("src", "tag", "process_set"), "irecv": ("src", "tag", "process_set"),
    "join": ("device",), "barrier": ("process_set",), "poll": ("handle",), "synchronize": ("handle",),
    "broadcast_object": ROOTED, "allgather_object": ("name", "process_set"),
}  # fmt: skip


@ranks(2)
def test_operations_on_arrays() -> None:
    def array() -> dict[str, Any]:
        return {"array": np.ones(4, np.float32)}

    def arrays() -> dict[str, Any]:
        return {"arrays": [np.ones(4, np.float32), np.ones(2)]}

    def rooted() -> dict[str, Any]:
        return {**array(), "root_rank": hvd.rank()}

    given = {
        "": dict, "allreduce": array, "allgather": array, "alltoall": array, "reducescatter": array, "grouped": arrays,
        "broadcast": rooted, "reduce": rooted, "reducescatter_": array, "gather": rooted, "scatter": rooted, "recv": array,
        "irecv": array, "send": lambda: {**array(), "dst": 0}, "isend": lambda: {**array(), "dst": 0},
        "broadcast_object": lambda: {"obj": 1, "root_rank": hvd.rank()}, "allgather_object": lambda: {"obj": 1},
    }  # fmt: skip
    check(hvd, ARRAYS, given)
    for call in (hvd.allreduce_, hvd.broadcast_):
        with pytest.raises(ValueError, match=r"not \[1.0\] \(a list\): np.asarray"):
            call([1.0], **({"root_rank": 0} if call is hvd.broadcast_ else {}))
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2.0] * 3, "the ranks have counted alike"


TORCH = {
    **{name: arguments for name, arguments in ARRAYS.items() if not name.startswith(("grouped", "scatter"))},
    "allreduce": (*REDUCTION, "compression"), "reducescatter": (*SHARE, "compression"),
    **calls_of("grouped_allreduce", ("", "_", "_async", "_async_"), (*REDUCTION, "tensors")),
    "grouped_allreduce": (*REDUCTION, "tensors", "compression"),
    **calls_of("grouped_allgather", TWO, ("name", "process_set", "tensors")),
    "grouped_reducescatter_async": (*SHARE, "tensors"), "grouped_reducescatter": (*SHARE, "tensors", "compression"),
    **calls_of("scatter", TWO, (*ROOTED, "splits")),
}  # fmt: skip


@ranks(2)
def test_operations_on_torch_tensors() -> None:
    def tensor() -> dict[str, Any]:
        return {"tensor": torch.ones(4)}

    def tensors() -> dict[str, Any]:
        return {"tensors": [torch.ones(4), torch.ones(2)]}

    def rooted() -> dict[str, Any]:
        return {**tensor(), "root_rank": hvd.rank()}

    given = {
        "": dict, "allreduce": tensor, "allgather": tensor, "alltoall": tensor, "reducescatter": tensor,
        "grouped": tensors, "broadcast": rooted, "reduce": rooted, "gather": rooted, "scatter": rooted, "recv": tensor,
        "irecv": tensor, "send": lambda: {**tensor(), "dst": 0}, "isend": lambda: {**tensor(), "dst": 0},
        "broadcast_object": lambda: {"obj": 1, "root_rank": hvd.rank()}, "allgather_object": lambda: {"obj": 1},
    }  # fmt: skip
    check(torch_hvd, TORCH, given)
    operations = [
        name for name in TORCH if "tensor" in given[max((w for w in given if name.startswith(w)), key=len)]()
    ]
    for name in operations:
        rest = (
            {"root_rank": hvd.rank()} if name.startswith(("broadcast", "reduce", "gather", "scatter")) else {}
        )
        rest = {} if name.startswith("reducescatter") else {"dst": 0} if "send" in name else rest
        for value in ([1, 2, 3], "abc", Odd(), 4, np.ones(3)):
            with pytest.raises((TypeError, ValueError), match=r"torch\.Tensor|of torch"):
                getattr(torch_hvd, name)(value, **rest)
    for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter"):
        with pytest.raises(TypeError, match="list or tuple of torch.Tensors"):
            getattr(torch_hvd, name)(torch.ones(3, 2))
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            getattr(torch_hvd, name)([torch.ones(3), "abc"])
    with pytest.raises(TypeError, match=r"optimizer=.*Linear.* an optimizer of torch"):
        torch_hvd.DistributedOptimizer(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="optimizer=None cannot be used"):
        torch_hvd.broadcast_optimizer_state(None, 0)
    with pytest.raises(
        ValueError, match=r"params=7 \(an int\) cannot be used; params takes model.state_dict"
    ):
        torch_hvd.broadcast_parameters(7, 0)
    assert torch_hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


TENSORFLOW = {
    "allreduce": (*REDUCTION, "compression"), "grouped_allreduce": (*REDUCTION, "compression", "tensors"),
    "allgather": ("name", "process_set"), "grouped_allgather": ("name", "process_set", "tensors"),
    "broadcast": ROOTED, "alltoall": ("splits", "name", "process_set"), "reducescatter": (*SHARE, "compression"),
    "grouped_reducescatter": (*SHARE, "compression", "tensors"),
}  # fmt: skip


@pytest.mark.long(15)
@needs_tensorflow
@ranks(2)
def test_operations_on_tensorflow_tensors() -> None:
    import tensorflow as tf

    import horoclone.tensorflow as tf_hvd

    def tensor() -> dict[str, Any]:
        return {"tensor": tf.ones(4)}

    given = {
        "": tensor, "grouped": lambda: {"tensors": [tf.ones(4), tf.ones(2)]},
        "broadcast": lambda: {**tensor(), "root_rank": hvd.rank()},
    }  # fmt: skip
    check(tf_hvd, TENSORFLOW, given)
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        with pytest.raises((TypeError, ValueError), match=rf"{name}: tensor=<Odd> .*tf.Tensor"):
            getattr(tf_hvd, name)(Odd())
    for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
        with pytest.raises(TypeError, match="a list or tuple of tensors"):
            getattr(tf_hvd, name)(tf.ones((3, 2)))
    assert tf_hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist() == [2.0] * 3


JAX = {
    "allreduce": (*REDUCTION, "compression"), "allgather": ("name", "process_set"), "broadcast": ROOTED,
    "alltoall": ("splits", "name", "process_set"), "reducescatter": SHARE, "barrier": ("process_set",),
}  # fmt: skip


@needs_jax
@ranks(2)
def test_operations_on_jax_arrays() -> None:
    import jax
    import jax.numpy as jnp

    import horoclone.jax as jax_hvd

    def tree() -> dict[str, Any]:
        return {"tree": {"w": jnp.ones(4)}}

    given = {
        "": tree, "alltoall": lambda: {"array": jnp.ones(4)}, "barrier": dict,
        "broadcast": lambda: {**tree(), "root_rank": hvd.rank()},
    }  # fmt: skip
    check(jax_hvd, JAX, given)
    for name in ("allreduce", "allgather", "broadcast", "reducescatter"):
        function = getattr(jax_hvd, name)
        with pytest.raises(
            TypeError, match=rf"{name}: tree=<Odd> .* at \['w'\] cannot be used; it takes an array"
        ):
            function({"v": jnp.ones(2), "w": Odd()})
        with pytest.raises(TypeError, match=rf"{name}: tree='abc' \(a str\) cannot be used"):
            function("abc")
        with pytest.raises(TypeError, match=rf"{name}: name=3 \(an int\)"):  # while a program is built, too
            jax.jit(lambda x, function=function: function(x, name=3))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"alltoall: array=<Odd>"):
        jax_hvd.alltoall(Odd())
    with pytest.raises(TypeError, match=r"alltoall: array=\[.*one array, not a tree of 2"):
        jax_hvd.alltoall([jnp.ones(2), jnp.ones(2)])
    assert jax_hvd.allreduce(jnp.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
