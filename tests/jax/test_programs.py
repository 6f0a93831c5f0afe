"""What programs do with collectives: derivatives, loops, batches, donation, names, several programs, errors."""

from __future__ import annotations

import re
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, ranks

jax = later("jax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


def jax_errors() -> tuple[type[Exception], ...]:
    return jax.errors.JaxRuntimeError, ValueError  # the second: of its dispatch in C++


def both(function: Any, *args: Any) -> list[Any]:
    return [function(*args), jax.jit(function)(*args)]


@ranks(3)
def test_gradients_are_horovods() -> None:
    me, n = hvd.rank(), hvd.size()
    x = jnp.arange(2.0 * n) + 1
    weights = [(r + 1) * jnp.arange(1.0, 2.0 * n * n + 1) for r in range(n)]  # each rank's cotangent

    def pulled(function: Any) -> Any:
        def loss(x: Any) -> Any:
            y = function(x)
            return (y * weights[me][: y.size]).sum()

        return both(jax.grad(loss), x)

    total = sum(np.asarray(w) for w in weights)
    for g in pulled(lambda x: hvd.allreduce(x, op=hvd.Sum)):
        assert np.allclose(g, total[: 2 * n])
    for g in pulled(lambda x: hvd.allreduce(x, prescale_factor=2.0)):
        assert np.allclose(g, 2 * total[: 2 * n] / n)
    for g in pulled(lambda x: hvd.broadcast(x, 1)):
        assert np.allclose(g, total[: 2 * n] / n if me == 1 else 0)
    for g in pulled(hvd.allgather):
        assert np.allclose(g, total[2 * n * me : 2 * n * (me + 1)] / n)
    own = [np.asarray(w)[:2] for w in weights]
    for g in pulled(hvd.reducescatter):
        assert np.allclose(g, np.concatenate(own))
    for g in pulled(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        assert np.allclose(g, n * np.concatenate(own))
    for g in pulled(hvd.alltoall):
        assert np.allclose(g, np.concatenate([np.asarray(w)[2 * me : 2 * me + 2] for w in weights]))
    for minimum in (hvd.Min, hvd.Product):
        with pytest.raises(hvd.Unsupported, match="only Average and Sum are linear"):
            jax.jit(jax.grad(lambda x, op=minimum: hvd.allreduce(x, op=op).sum()))(x)


@ranks(2)
def test_derivatives_of_trees_with_integers_forward_and_twice() -> None:
    tree = {"x": jnp.arange(3.0), "n": jnp.arange(3), "y": jnp.float32(2)}

    def loss(t: Any) -> Any:
        out = hvd.allreduce(t, op=hvd.Sum)
        return (out["x"] ** 2).sum() * out["y"] + out["n"].sum()

    for g in both(jax.grad(loss, allow_int=True), tree):
        assert np.allclose(g["x"], 2 * 2 * 2 * np.arange(3) * 4) and np.allclose(g["y"], 2 * 4 * 5)
    for _, pushed in both(
        lambda x: jax.jvp(lambda x: hvd.allreduce(x, op=hvd.Sum), (x,), (jnp.ones(3),)), tree["x"]
    ):
        assert pushed.tolist() == [2.0] * 3
    second = jax.jit(jax.hessian(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()))(tree["x"])
    assert np.allclose(second, 8 * np.eye(3))


@ranks(2)
def test_in_scan_cond_while_checkpoint_and_under_vmap() -> None:
    me = hvd.rank()

    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    def looped(x: Any) -> Any:
        end, seen = jax.lax.scan(lambda c, s: (total(c) + s, c.sum()), x, jnp.arange(20.0))
        return end, seen

    end, seen = jax.jit(looped)(jnp.full(3, 1.0 + me))
    c, expected = 0.0, []
    values = [1.0, 2.0]
    for s in range(20):
        expected.append(3 * values[me])
        c = sum(values) + s
        values = [c, c]
    assert np.allclose(end, c, rtol=1e-5) and np.allclose(seen, expected, rtol=1e-5)

    def loss(x: Any) -> Any:
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(total(c)), None), x, None, length=5)
        return y.sum()

    plain = jax.jit(jax.grad(loss))(jnp.ones(3))
    remade = jax.jit(jax.grad(jax.checkpoint(loss)))(jnp.ones(3))
    assert np.array_equal(plain, remade)

    taken = jax.jit(lambda p, x: jax.lax.cond(p, total, lambda x: -x, x))
    assert taken(True, jnp.ones(2)).tolist() == [2.0] * 2 and taken(False, jnp.ones(2)).tolist() == [-1.0] * 2
    grown = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] < 100, total, x))(jnp.ones(2))
    assert grown.tolist() == [128.0] * 2

    batch = jnp.arange(12.0).reshape(4, 3) * (me + 1)
    for out in both(jax.vmap(total), batch):
        assert np.allclose(out, 3 * np.arange(12).reshape(4, 3))
    for out in both(jax.vmap(hvd.allgather, in_axes=1, out_axes=1), batch):
        assert np.allclose(out, np.concatenate([np.arange(12).reshape(4, 3) * (r + 1) for r in range(2)]))
    for out in both(jax.vmap(hvd.alltoall, in_axes=1, out_axes=1), batch):
        half = np.arange(12).reshape(4, 3)[2 * me : 2 * me + 2]
        assert np.allclose(out, np.concatenate([half, 2 * half]))
    rows = [np.random.default_rng(r).normal(size=(4, 3)).astype(np.float32) for r in range(2)]
    apart = [hvd.allreduce(jnp.asarray(row), op=hvd.Adasum) for row in rows[me]]
    for out in both(jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum)), jnp.asarray(rows[me])):
        assert np.allclose(out, np.stack(apart), rtol=1e-5), "each example is an array of its own"
    for out in both(jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum)), jnp.ones((0, 3))):
        assert out.shape == (0, 3)
    text = jax.jit(jax.vmap(total)).lower(batch).as_text()
    assert text.count("custom_call @horoclone_") == 1 and "while" not in text


@ranks(2)
def test_one_function_called_at_many_places_of_a_program() -> None:
    """Its calls share one name in the trace: each place must meet the same place of the other rank."""

    @jax.jit
    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    @jax.jit
    def program(xs: list[Any]) -> list[Any]:
        return [total(x * i) for i, x in enumerate(xs)]

    text = program.lower([jnp.ones(100)] * 12).as_text()
    assert text.count("custom_call @horoclone_") == 1, "the function was meant to be shared"
    for turn in range(20):
        out = program([jnp.full(100, float(10 * turn + i + hvd.rank())) for i in range(12)])
        for i, y in enumerate(out):
            assert np.all(np.asarray(y) == i * (2 * (10 * turn + i) + 1)), (turn, i, y[0])


@ranks(2)
def test_many_calls_of_equal_form_in_one_program() -> None:
    @jax.jit
    def program(x: Any) -> Any:
        return [hvd.allreduce(x * i, op=hvd.Sum) for i in range(30)]

    names = re.findall(r'name = "([^"]+)"', program.lower(jnp.ones(5)).as_text())
    assert len(set(names)) == 30 and not any("0x" in name for name in names)
    assert hvd.allgather_object(names)[0] == names
    for _ in range(5):
        assert [float(y[0]) for y in program(jnp.full(5, 1.0 + hvd.rank()))] == [3.0 * i for i in range(30)]


@ranks(2)
def test_calls_that_are_equal_are_not_merged_and_used_once_each() -> None:
    def program(x: Any) -> Any:
        a, b = hvd.allreduce(x, name="same", op=hvd.Sum), hvd.allreduce(x, name="same", op=hvd.Sum)
        return a + 10 * b

    assert jax.jit(program)(jnp.ones(3)).tolist() == [22.0] * 3
    compiled = jax.jit(program).lower(jnp.ones(3)).compile().as_text()
    assert compiled.count('custom_call_target="horoclone_collective"') == 2


@ranks(2)
def test_a_rank_that_does_not_use_a_result_takes_part() -> None:
    def program(x: Any) -> Any:
        y = hvd.allreduce(x, op=hvd.Sum)
        return y if hvd.rank() == 0 else x

    assert jax.jit(program)(jnp.ones(2)).tolist() == [2.0 - hvd.rank()] * 2


@ranks(2)
def test_donated_memory_is_used_for_the_result_and_the_values_are_right() -> None:
    program = jax.jit(lambda t: hvd.allreduce(t, op=hvd.Sum), donate_argnums=0)
    shape = (1 << 18,)
    for _ in range(3):
        given = [jnp.full(shape, 1.0 + hvd.rank()), jnp.full(shape, 5.0)]
        places = {x.unsafe_buffer_pointer() for x in given}
        out = program(given)
        assert np.all(np.asarray(out[0]) == 3) and np.all(np.asarray(out[1]) == 10)
        assert {x.unsafe_buffer_pointer() for x in out} == places
        assert all(x.is_deleted() for x in given)
    kept = jnp.full(shape, 2.0)
    assert float(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum).sum() + x.sum())(kept)) == 6.0 * shape[0]
    assert np.all(np.asarray(kept) == 2)


@ranks(2)
def test_opposite_orders_meet_by_name() -> None:
    """Two programs in two threads: rank 1 starts them the other way round."""
    names = ["first", "second"]
    programs = {n: jax.jit(lambda x, n=n: hvd.allreduce(x, op=hvd.Sum, name=n)) for n in names}
    for name in names:
        programs[name].lower(jnp.ones(4)).compile()
    order = names if hvd.rank() == 0 else names[::-1]
    for turn in range(10):
        out: dict[str, Any] = {}

        def one(name: str, turn: int = turn, out: dict[str, Any] = out) -> None:
            given = np.full(4, (1.0 if name == "first" else 100.0) * (turn + 1 + hvd.rank()), np.float32)
            out[name] = np.asarray(programs[name](given))

        threads = [threading.Thread(target=one, args=(name,)) for name in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert np.all(out["first"] == 2 * turn + 3) and np.all(out["second"] == 100 * (2 * turn + 3))


@ranks(2)
def test_in_one_program_the_orders_may_differ_too() -> None:
    x = jnp.ones(4)
    names = ["a", "b", "c"] if hvd.rank() == 0 else ["c", "a", "b"]
    program = jax.jit(lambda x: {n: hvd.allreduce(x * (ord(n) - 96), name=n, op=hvd.Sum) for n in names})
    for _ in range(10):
        out = program(x)
        assert {n: float(v[0]) for n, v in out.items()} == {"a": 2.0, "b": 4.0, "c": 6.0}


@ranks(2)
def test_calls_keep_their_order_on_a_rank_that_gives_or_gets_nothing() -> None:
    """XLA runs what it takes for constant, and calls that use it, before others."""

    def loss(x: Any) -> Any:
        return (hvd.broadcast(hvd.allreduce(x, op=hvd.Sum) * 1.5, 0) ** 2).sum()

    assert np.all(np.asarray(jax.jit(jax.grad(loss))(jnp.ones(2))) == 9)  # through zeros on rank 1

    def weighted(x: Any) -> Any:
        several = hvd.allreduce(x, op=hvd.Sum)
        mean = hvd.allreduce(several + 1, name="mean")
        of_one = hvd.allreduce(mean * 2, name="of one", weight=1 - hvd.rank())
        return hvd.allreduce(of_one, name="last") * several * mean

    assert np.all(np.asarray(jax.jit(weighted)(jnp.ones(2))) == 36)


@ranks(2)
def test_a_mismatch_raises_with_our_text_and_the_runtime_goes_on() -> None:
    wrong = jax.jit(lambda x: hvd.allreduce(x, name="crossed", op=hvd.Sum))
    for _ in range(2):
        with pytest.raises(jax_errors(), match=r"allreduce 'crossed'.*float32\[[23]\]") as caught:
            jax.block_until_ready(wrong(jnp.ones(2 + hvd.rank())))
        error = hvd.horovod_error_of(caught.value)
        assert isinstance(error, hvd.Mismatch) and str(error).startswith("allreduce 'crossed'")
        assert float(jax.jit(lambda x: hvd.allreduce(x, name="fine"))(jnp.float32(3))) == 3.0
    assert hvd.horovod_error_of(ValueError("something else")) is None
    # Too big to run in the caller's thread
    heavy = jax.jit(lambda x: hvd.allreduce(x @ x, name="crossed2").sum())
    with pytest.raises(jax_errors(), match="allreduce 'crossed2'"):
        jax.block_until_ready(heavy(jnp.ones((300 + hvd.rank(), 300 + hvd.rank()))))
    assert float(heavy(jnp.ones((300, 300)))) == 300.0**3


@ranks(2)
def test_unequal_rows_under_jit_raise_with_the_way_out() -> None:
    gather = jax.jit(lambda x: hvd.allgather(x, name="rows"))
    with pytest.raises(jax_errors(), match=r"3 rows.*compiled for (2|4).*same number of rows"):
        jax.block_until_ready(gather(jnp.ones((1 + hvd.rank(), 2))))
    assert gather(jnp.ones((2, 2))).shape == (4, 2)


@ranks(2)
def test_wrong_arguments_raise_while_the_program_is_built() -> None:
    with pytest.raises(ValueError, match=r"\['z'\] is complex64"):
        jax.jit(hvd.allreduce)({"z": jnp.ones(2, jnp.complex64)})
    with pytest.raises(ValueError, match="uint32"):
        hvd.allreduce(jax.random.key_data(jax.random.key(0)))
    with pytest.raises(ValueError, match="no first dimension"):
        jax.jit(hvd.allgather)(1.0)
    with pytest.raises(ValueError, match="not divisible"):
        jax.jit(hvd.alltoall)(jnp.ones(3))
    with pytest.raises(ValueError, match="is not a reduction"):
        hvd.allreduce(jnp.ones(2), op=17)
    with pytest.raises(hvd.Unsupported, match="Pad the rows"):
        jax.jit(lambda x: hvd.alltoall(x, splits=[1, 1]))(jnp.ones(2))
    with pytest.raises(hvd.Unsupported, match="outside"):
        jax.jit(lambda x: (hvd.barrier(), x))(1.0)
    with pytest.raises(ValueError, match="has not been registered"):
        hvd.allreduce(jnp.ones(2), process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="Average of bool"):
        hvd.allreduce(jnp.array([True]))
    with pytest.raises(jax_errors(), match="Average of bool"):
        jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.array([True])))


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_process_sets_and_programs_that_outlive_them() -> None:
    me = hvd.rank()
    pair = hvd.add_process_set([0, 2])
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))
    gather = jax.jit(lambda x: hvd.allgather(x, process_set=pair))
    if me != 1:
        assert float(program(jnp.float32(me + 1))) == 4.0
        assert gather(jnp.full(1, me)).tolist() == [0, 2]
        g = jax.grad(lambda x: hvd.broadcast(x, 2, process_set=pair))(1.0)
        assert float(g) == (1.0 if me == 2 else 0.0)
    else:
        with pytest.raises(jax_errors(), match="not a member"):
            jax.block_until_ready(program(jnp.float32(1)))
    hvd.remove_process_set(pair)
    with pytest.raises(jax_errors(), match=r"process set \[0,2\] of this program is not registered"):
        jax.block_until_ready(program(jnp.float32(1)))
    other = hvd.add_process_set([0, 1])  # takes the free number: the program must not take it for its own
    with pytest.raises(jax_errors(), match="not registered"):
        jax.block_until_ready(program(jnp.float32(1)))
    again = hvd.add_process_set([0, 2])
    if me != 1:
        assert float(program(jnp.float32(me + 1))) == 4.0
    hvd.remove_process_set(again)
    hvd.remove_process_set(other)


@ranks(2)
def test_work_that_follows_a_collective_may_hold_further_ones() -> None:
    """The completion's thread goes on with the program: it must not wait for a completion that it would deliver."""

    @jax.jit
    def program(x: Any) -> Any:
        y = hvd.allreduce(x, op=hvd.Sum)
        z = y @ y / 1e3
        end, _ = jax.lax.scan(lambda c, _: (hvd.allreduce(jnp.tanh(c @ y)), None), z, None, length=5)
        return jax.lax.cond(end[0, 0] > -9, lambda e: hvd.allreduce(e, op=hvd.Sum), lambda e: e, end)

    for _ in range(3):
        out = program(jnp.ones((200, 200)))
    assert out.shape == (200, 200) and hvd.allgather_object(float(out.sum()))[0] == float(out.sum())


SEVERAL_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import horoclone.jax as hvd
hvd.init()
assert len(jax.devices()) == 2
mesh = Mesh(jax.devices(), ("d",))
x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("d")))
try:
    jax.jit(jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x)
except hvd.Unsupported as error:
    assert "jax.lax.psum" in str(error), error
else:
    raise SystemExit("shard_map was not refused")
try:
    jax.block_until_ready(jax.jit(hvd.allreduce)(x))
except (jax.errors.JaxRuntimeError, ValueError, hvd.Unsupported) as error:
    assert "devices" in str(error), error
else:
    raise SystemExit("a program over two devices was not refused")
assert jax.jit(hvd.allreduce)(jax.device_put(jnp.ones(3), jax.devices()[1])).tolist() == [1, 1, 1]
print("refused")
"""


def test_programs_over_several_local_devices_are_refused(launch: Any) -> None:
    import sys

    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert "refused" in launch([sys.executable, "-c", SEVERAL_DEVICES], env=env, timeout_s=100).stdout


def test_an_unused_call_stays_whatever_else_jax_tells_the_rule() -> None:
    """JAX 0.12 also tells which inputs are used."""
    from jax._src.interpreters import partial_eval

    from horoclone.jax.primitives import collective_p

    equation = types.SimpleNamespace(invars=[1, 2])
    rule = partial_eval.dce_rules[collective_p]
    for given in (([False], equation), ([False], [True, False], equation)):
        assert rule(*given) == ([True, True], equation)


def cut(whole, size):
    return jnp.split(whole, size)


def exchanged(xs, size):
    parts = [cut(x, size) for x in xs]
    return [jnp.concatenate([part[to] for part in parts]) for to in range(size)]


# Name -> call on one rank's array, the same on everybody's, factor of the gradient.
CASES = {
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs, n: [sum(xs)] * n, lambda n: 1),
    "allgather": (lambda x: hvd.allgather(x), lambda xs, n: [jnp.concatenate(xs)] * n, lambda n: 1 / n),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda xs, n: [xs[1]] * n, lambda n: 1 / n),
    "reducescatter": (lambda x: hvd.reducescatter(x), lambda xs, n: cut(sum(xs) / n, n), lambda n: n),
    "reducescatter sum": (
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0), lambda xs, n: cut(2 * sum(xs), n), lambda n: n,
    ),
    "alltoall": (lambda x: hvd.alltoall(x), exchanged, lambda n: 1),
}  # fmt: skip


@ranks(2)
def test_they_are_those_of_one_process() -> None:
    size, rank = hvd.size(), hvd.rank()
    xs = [jnp.asarray(np.random.RandomState(r).randn(6, 2), jnp.float32) for r in range(size)]
    for name, (call, everybody, factor) in CASES.items():

        def first(x, call=call):
            return jax.grad(lambda x: (call(x) ** 3).sum())(x)

        def backward(grads, everybody=everybody, factor=factor):
            (found,) = jax.vjp(lambda xs: everybody(xs, size), xs)[1](list(grads))
            return [factor(size) * g for g in found]

        ys = everybody(xs, size)
        by_y = [3 * y**2 for y in ys]
        to_points = jax.grad(lambda points, b=backward: sum((g**2).sum() for g in b(points)))(by_y)
        expected = backward([6 * y * v for y, v in zip(ys, to_points, strict=True)])[rank]
        assert np.allclose(first(xs[rank]), backward(by_y)[rank], rtol=1e-3, atol=1e-3), name
        second = jax.grad(lambda x, f=first: (f(x) ** 2).sum())(xs[rank])
        assert np.allclose(second, expected, rtol=1e-3, atol=1e-2), (name, second, expected)
        # Forward over reverse: every rank pushes its own tangent, and the sums over the ranks agree with the above.
        along = jax.jvp(lambda x, f=first: (f(x) ** 2).sum(), (xs[rank],), (jnp.ones_like(xs[rank]),))[1]
        totals = [float(hvd.allreduce(v, op=hvd.Sum)) for v in (along, second.sum() / factor(size))]
        assert np.isclose(*totals, rtol=1e-3, atol=1e-2), (name, totals)


def events_in(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and stated facts of every event in the profile that lies in `folder`."""
    (file,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    return [
        (event.name, dict(event.stats))
        for plane in data.planes
        for line in plane.lines
        for event in line.events
    ]


@ranks(2)
def test_calls_have_spans(tmp_path: Path) -> None:
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="in program") * 2)
    assert program(jnp.ones(3)).tolist() == [4.0] * 3
    folder = tmp_path / str(hvd.rank())
    with jax.profiler.trace(str(folder)):
        hvd.allreduce({"w": jnp.ones(3)}, name="eager")
        hvd.allgather(jnp.ones((1, 2)))
        jax.block_until_ready(program(jnp.ones(3)))
    events = events_in(folder)
    ours = {(name, facts.get("tensor", "")) for name, facts in events if name.startswith("horoclone.")}
    assert ours == {("horoclone.allreduce", "eager"), ("horoclone.allgather", "")}, ours
    in_program = [facts["hlo_op"] for _, facts in events if "horoclone" in str(facts.get("hlo_op"))]
    assert in_program and set(in_program) == {"horoclone_collective.1"}, in_program
    text = program.lower(jnp.ones(3)).compile().as_text()
    assert "horoclone.allreduce.in program/horoclone_collective" in text, text
