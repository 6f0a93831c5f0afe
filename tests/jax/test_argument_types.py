"""An argument of the wrong type: every operation on JAX arrays says which one it is, what was given, and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import later, load, ranks

import horoclone as hvd

jax = later("jax")
jnp = later("jax.numpy")
jax_hvd = later("horoclone.jax")

shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")

JAX = {
    "allreduce": (*shared.REDUCTION, "compression"), "allgather": ("name", "process_set"), "broadcast": shared.ROOTED,
    "alltoall": ("splits", "name", "process_set"), "reducescatter": shared.SHARE, "barrier": ("process_set",),
}  # fmt: skip


@ranks(2)
def test_operations_on_jax_arrays() -> None:
    def tree() -> dict[str, Any]:
        return {"tree": {"w": jnp.ones(4)}}

    given = {
        "": tree, "alltoall": lambda: {"array": jnp.ones(4)}, "barrier": dict,
        "broadcast": lambda: {**tree(), "root_rank": hvd.rank()},
    }  # fmt: skip
    shared.check(jax_hvd, JAX, given)
    for name in ("allreduce", "allgather", "broadcast", "reducescatter"):
        function = getattr(jax_hvd, name)
        with pytest.raises(
            TypeError, match=rf"{name}: tree=<Odd> .* at \['w'\] cannot be used; it takes an array"
        ):
            function({"v": jnp.ones(2), "w": shared.Odd()})
        with pytest.raises(TypeError, match=rf"{name}: tree='abc' \(a str\) cannot be used"):
            function("abc")
        with pytest.raises(TypeError, match=rf"{name}: name=3 \(an int\)"):  # while a program is built, too
            jax.jit(lambda x, function=function: function(x, name=3))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"alltoall: array=<Odd>"):
        jax_hvd.alltoall(shared.Odd())
    with pytest.raises(TypeError, match=r"alltoall: array=\[.*one array, not a tree of 2"):
        jax_hvd.alltoall([jnp.ones(2), jnp.ones(2)])
    assert jax_hvd.allreduce(jnp.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
