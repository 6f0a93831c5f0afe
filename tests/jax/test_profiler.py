"""Our calls in JAX's profiler: spans around those outside of programs, and their place in compiled ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from world import later, ranks

jax = later("jax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


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
