"""A step that one rank alone leaves out is not made up for by its next one: Mismatch on every rank, with the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from world import later, ranks

jax = later("jax")
optax = later("optax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


STEPS = 6
BAD = 3  # the step in which a gradient is not finite


def distributed(**options: Any) -> Any:
    return hvd.DistributedOptimizer(optax.sgd(1.0), **options)


def by_hand(tx: Any) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.lax.cond(
            jnp.isfinite(updates["w"]).all(),
            lambda: tx.update(updates, state, params),
            lambda: (jax.tree.map(jnp.zeros_like, updates), state),
        )

    return optax.GradientTransformation(tx.init, update)


def skipping(tx: Any) -> Any:
    return optax.MultiSteps(tx, 1, should_skip_update_fn=optax.skip_not_finite)


AROUND: dict[str, Callable[[], Any]] = {
    "apply_if_finite": lambda: optax.apply_if_finite(distributed(), 9),
    "chain": lambda: optax.apply_if_finite(optax.chain(optax.scale(1.0), distributed()), 9),
    "passes": lambda: optax.apply_if_finite(distributed(backward_passes_per_step=2), 9),
    "compression": lambda: optax.apply_if_finite(distributed(compression=hvd.Compression.bf16), 9),
    "MultiSteps": lambda: skipping(distributed()),
    "cond": lambda: by_hand(distributed()),
    "both": lambda: optax.apply_if_finite(by_hand(distributed()), 9),
}
INSIDE: dict[str, Callable[[], Any]] = {
    "apply_if_finite": lambda: hvd.DistributedOptimizer(optax.apply_if_finite(optax.sgd(1.0), 9)),
    "MultiSteps": lambda: hvd.DistributedOptimizer(skipping(optax.sgd(1.0))),
}


def gradient(step: int, is_bad: bool) -> dict[str, Any]:
    value = np.full(3, step + hvd.rank() / 2, np.float32)
    return {"w": jnp.asarray(np.where(is_bad, np.nan, value))}


def trained(tx: Any, bad: Callable[[int], bool], how: str) -> list[float]:
    """The parameter after each step."""
    p: Any = {"w": jnp.zeros(3)}
    state = tx.init(p)

    def one(p: Any, state: Any, g: Any) -> Any:
        changes, state = tx.update(g, state, p)
        return optax.apply_updates(p, changes), state

    grads = [gradient(step, bad(step)) for step in range(STEPS)]
    if how == "scan":

        def body(carry: Any, g: Any) -> Any:
            p, state = one(*carry, g)
            return (p, state), p["w"][0]

        together = jax.tree.map(lambda *g: jnp.stack(g), *grads)
        _, seen = jax.jit(lambda p, s, g: jax.lax.scan(body, (p, s), g))(p, state, together)
        return np.asarray(seen).tolist()
    program, seen = jax.jit(one) if how == "jit" else one, []
    for g in grads:
        p, state = program(p, state, g)
        seen.append(float(p["w"][0]))
    return seen


def expected(bad: Callable[[int], bool], size: int, passes: int = 1) -> list[float]:
    p, gathered, seen = 0.0, [], []
    for step in range(STEPS):
        if not bad(step):
            gathered.append(step + (size - 1) / 4)
            if len(gathered) == passes:
                p -= sum(gathered) / passes
                gathered = []
        seen.append(p)
    return seen


@pytest.mark.in_turn("around")
@pytest.mark.parametrize("how", ["jit", "eager", "scan"])
@pytest.mark.parametrize("around", sorted(AROUND))
@ranks(2)
def test_one_rank_alone(around: str, how: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        trained(AROUND[around](), lambda step: step == BAD and hvd.rank() == 1, how)
    found = hvd.horovod_error_of(caught.value)
    assert isinstance(found, hvd.Mismatch), caught.value
    last, left_out = (2, 2) if around == "passes" else (3, 1)
    assert f", having left out {left_out} and rank 0 announced that of " in str(found), found
    assert "Mismatched steps. One of them takes its steps by what it alone sees" in str(found), found
    assert f"last common step was number {last}, and this one is number" in str(found), found
    assert hvd.allreduce(jnp.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


@pytest.mark.in_turn
@pytest.mark.parametrize("around", sorted(AROUND))
@ranks(2)
def test_all_ranks_alike(around: str) -> None:
    """Also with steps of another wrapper in between, whose calls have the same form."""
    passes = 2 if around == "passes" else 1

    def bad(step: int) -> bool:
        return step in (0, BAD)

    for how in ("jit", "scan", "eager"):
        tolerance = 1e-2 if around == "compression" else 1e-6
        seen = trained(AROUND[around](), bad, how)
        assert np.allclose(seen, expected(bad, hvd.size(), passes), rtol=tolerance), (how, seen)


@pytest.mark.parametrize("inside", sorted(INSIDE))
@ranks(2)
def test_inside_it_all_ranks_leave_out_what_one_rank_cannot_use(inside: str) -> None:
    def bad(step: int) -> bool:
        return step == BAD

    seen = trained(INSIDE[inside](), lambda step: bad(step) and hvd.rank() == 1, "jit")
    assert np.allclose(seen, expected(bad, hvd.size()))


@ranks(2)
def test_a_rank_stays_behind_until_the_runtime_begins_anew() -> None:
    """Who catches the error and goes on is not paired with another step either; a new life starts in step."""
    tx, p = by_hand(distributed()), {"w": jnp.zeros(3)}
    program, state = jax.jit(tx.update), tx.init(p)

    def step(number: int, is_bad: bool) -> float:
        changes, _ = program(gradient(number, is_bad), state, p)
        return float(changes["w"][0])

    assert step(1, False) == -1.25
    if hvd.rank() == 1:
        step(2, True)
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError), match="Mismatched steps"):
            step(3, False)
    hvd.shutdown()
    hvd.init()
    assert step(4, False) == -4.25


@ranks(2)
def test_two_optimizers_of_one_form_in_one_program_are_no_steps_of_one_another() -> None:
    """They share a name, and XLA may run them in any order: no rank is told off for what it has not done."""

    def both(a: Any, b: Any) -> Any:
        one, other = by_hand(distributed()), by_hand(distributed())
        p = {"w": jnp.zeros(3)}
        return one.update(a, one.init(p), p)[0], other.update(b, other.init(p), p)[0]

    program = jax.jit(both)
    for number in range(20):
        first, second = program(gradient(number, False), gradient(number + 1, False))
        assert float(first["w"][0]) == -(number + 0.25) and float(second["w"][0]) == -(number + 1.25)


@pytest.mark.parametrize("how", ["jit", "eager"])
@ranks(2, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "0.5"})
def test_a_step_left_out_by_python_is_said_at_the_next_other_call(how: str) -> None:
    """The rank's next step is taken for the one that it has left out: nothing in it tells them apart. The call of
    another kind that comes after the steps, or the end, does."""
    tx, p = distributed(), {"w": jnp.zeros(3)}
    update, state = jax.jit(tx.update) if how == "jit" else tx.update, tx.init(p)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        for number in range(STEPS):
            if number == BAD and hvd.rank() == 1:
                continue
            jax.block_until_ready(update(gradient(number, False), state, p)[0])
        hvd.allreduce(jnp.ones(2), name="metrics")
    found = hvd.horovod_error_of(caught.value) or caught.value
    assert isinstance(found, hvd.Mismatch), caught.value
    assert "'metrics'" in str(found) and "jax.allreduce." in str(found), found
    assert str(found).count("test_steps_left_out.py:") >= 2, found
    assert hvd.allreduce(jnp.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
