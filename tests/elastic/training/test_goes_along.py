"""What an elastic job takes along when a rank is lost: process sets, autotune, timelines, an optimizer's buckets,
compression, cross_barrier and torch's process groups; and what a rank that comes may not do before run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from horoclone.launch.timelines import read

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
RUN = [sys.executable, "-m", "horoclone.launch", "-np", "3", "--min-np", "2", "-H", "localhost:3"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_everything_goes_on_with_the_ranks_that_are_left(launch: Any, tmp_path: Path) -> None:
    """Timelines and logs are kept for each generation; autotune begins anew, as the ranks are others."""
    trace, log = tmp_path / "trace.json", tmp_path / "tune.csv"
    flags = ["--timeline-filename", trace, "--autotune", "--autotune-log-file", log]
    command = [*RUN, *map(str, flags), sys.executable, HERE / "goes_along.py", tmp_path / "mark"]
    done = launch(command, env=ONE_THREAD, timeout_s=120)
    assert "generation 2 of 2 at step 9 dropped ()" in done.stdout, done.output
    assert "done 24 sizes [2, 3]" in done.stdout, done.output  # the set is now all there are
    assert "sets [0, 1] autotune {'searching': True" in done.stdout, done.output
    of_steps = {}  # buckets that began by a persistent plan in the last eight steps of each generation
    for number, counts in re.findall(r"generation (\d) size \d persistent (\[0, .*\])", done.stdout):
        counted = json.loads(counts)
        of_steps[number] = counted[-1] - counted[-9] if len(counted) > 8 else 0
    # plain, fp16, cross_barrier and sharded have one each; that of cross_barrier may end in the next step
    assert set(of_steps) == {"1", "2"} and all(31 <= one <= 33 for one in of_steps.values()), done.output
    first, second = read(trace), read(tmp_path / "trace.generation2.json")
    assert [events[0]["args"]["size"] for events in (first, second)] == [3, 2]
    for events in (first, second):
        assert any("ALLREDUCE" in str(event.get("name")) for event in events)
    assert read(tmp_path / "trace.group1.json")[0]["args"]["size"] == 3  # torch's process group has its own
    assert log.exists() and (tmp_path / "tune.generation2.csv").exists()


@pytest.mark.parametrize(
    ("how", "called"),
    [
        ("broadcast_parameters", "'first.weight'"),
        ("broadcast_object", "model"),
        ("process_set", "process_set"),
        ("barrier", "a collective before"),
    ],
)
def test_a_collective_before_run_of_a_rank_that_comes_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, how: str, called: str
) -> None:
    """Horovod waits for ever: the others are in run, and make no such call."""
    import horoclone.torch as hvd
    from horoclone import errors
    from horoclone.runtime import current, joining_rank

    class Native:
        rank, size = 2, 3

        def __getattr__(self, name: str) -> Any:
            if name in ("submit", "submit_group", "run", "declare", "submit_declared"):
                raise AssertionError("it reached the others")
            raise AttributeError(name)

    native = Native()
    monkeypatch.setattr(current, "runtime", native)
    monkeypatch.setattr(current, "dynamic", True)
    joining_rank.refuse_collectives(7)
    assert hvd.rank() == 2 and current.is_initialized()
    calls = {
        "broadcast_parameters": lambda: hvd.broadcast_parameters({"first.weight": torch.ones(2)}, 0),
        "broadcast_object": lambda: hvd.broadcast_object({"a": 1}, 0, name="model"),
        "process_set": lambda: hvd.add_process_set([0, 1]),
        "barrier": lambda: hvd.barrier(),
    }
    with pytest.raises(
        errors.Mismatch, match=rf"rank 2 has come .* \(generation 7\) .*{called}.* hvd\.elastic\.run"
    ):
        calls[how]()
    joining_rank.allow_collectives()
    assert current.runtime is native
    with pytest.raises(AssertionError, match="reached the others"):
        calls[how]()
