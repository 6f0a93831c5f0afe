"""The numbers of metrics() for trackers: their names, and an event file that TensorBoard reads back."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from world import ranks, run_python

import horoclone as hvd
from horoclone import tracking
from horoclone.runtime.flat_metrics import flattened


class Pair(NamedTuple):
    count: int
    seconds: float


def test_numbers_of_any_depth_are_named_by_their_path() -> None:
    nested = {
        "bytes": 7,
        "searching": True,
        "reason": "a text",
        "nothing": None,
        "waits": {"allreduce": Pair(2, 0.5), 3: (1, 2.0)},
        "histogram": [4, [5]],
        "late": {0: [{"rank": 9, "times": 1}, {"rank": 2, "times": 3}]},
        "numpy": np.float32(0.5),
        "a:b=c": np.int64(1),
    }
    found = flattened(nested, "x/")
    assert found == {
        "x/bytes": 7, "x/searching": 1, "x/waits/allreduce/count": 2, "x/waits/allreduce/seconds": 0.5,
        "x/waits/3/0": 1, "x/waits/3/1": 2.0, "x/histogram/0": 4, "x/histogram/1/0": 5,
        "x/late/0/rank9/times": 1, "x/late/0/rank2/times": 3, "x/numpy": 0.5, "x/a_b_c": 1,
    }  # fmt: skip
    assert {type(value) for value in found.values()} == {int, float}


def numbers_in(value: Any) -> int:
    """How many numbers there are, found without the code under test; `rank` only names an entry of a list."""
    if isinstance(value, dict):
        return sum(numbers_in(one) for key, one in value.items() if key != "rank")
    if isinstance(value, (list, tuple)):
        return sum(map(numbers_in, value))
    return int(isinstance(value, (bool, int, float)))


@ranks(2)
def test_every_number_of_metrics_is_there() -> None:
    for i in range(3):
        hvd.allreduce(np.ones(1000), name=f"x{i}")
    flat, nested = hvd.flat_metrics(), hvd.metrics()
    assert flat["horoclone/operations"] == nested["operations"] >= 3
    assert len(flat) == numbers_in(nested) > 10
    # MLflow: "Names may only contain alphanumerics, underscores, dashes, periods, spaces and slashes"
    assert all(re.fullmatch(r"horoclone/[\w\-. /]+", name) for name in flat)
    assert all(type(value) in (int, float) for value in flat.values())
    assert set(hvd.flat_metrics("")) == {name.removeprefix("horoclone/") for name in flat}


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    # Else TensorBoard's reader loads TensorFlow where it is installed, for its file system.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def log_some_steps(folder: str, all_ranks: bool) -> list[tuple[int, float]]:
    log = tracking.MetricsLog(folder, every=2, all_ranks=all_ranks)
    seen = []
    for step in range(1, 6):
        hvd.allreduce(np.ones(8), name="x")
        log.at(step)
        if step in (2, 4):
            seen.append((step, float(hvd.metrics()["operations"])))
    log.now(5)
    log.now(5)
    return [*seen, (5, float(hvd.metrics()["operations"]))]


@pytest.mark.parametrize("all_ranks", [False, True])
def test_tensorboard_reads_what_was_logged(worlds: Any, tmp_path: Path, all_ranks: bool) -> None:
    pytest.importorskip("tensorboard")
    seen = worlds.run(2, log_some_steps, folder=str(tmp_path), all_ranks=all_ranks)
    assert seen[0][-1][1] >= 5
    if all_ranks:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]
        for rank in range(2):
            assert scalars_in(tmp_path / f"rank{rank}")["horoclone/operations"] == seen[rank]
    else:
        assert len(list(tmp_path.iterdir())) == 1, "rank 0 alone writes"
        assert scalars_in(tmp_path)["horoclone/operations"] == seen[0]


@ranks(2)
def test_any_function_of_numbers_and_a_step_will_do() -> None:
    logged: list[tuple[str, int]] = []

    def log(numbers: dict[str, float], step: int) -> None:
        logged.extend((name, step) for name in numbers if name.endswith("/operations"))

    for all_ranks in (False, True):
        metrics_log = tracking.MetricsLog(log, every=3, all_ranks=all_ranks)
        for step in (2, 4, 6, 10):  # steps may be skipped: Keras's steps_per_execution does
            metrics_log.at(step)
    mine = [(f"horoclone/rank{hvd.rank()}/operations", step) for step in (4, 6, 10)]
    rank0s = [("horoclone/operations", step) for step in (4, 6, 10)] if hvd.rank() == 0 else []
    assert logged == rank0s + mine


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"to=3 \(int\); accepted: a folder"):
        tracking.MetricsLog(3)  # type: ignore[arg-type]
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"every={every}; accepted: a number of steps"):
            tracking.MetricsLog("runs", every=every)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        tracking.to_tensorboard("runs")


def test_an_event_file_loads_no_framework(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys, horoclone.tracking as t; t.to_tensorboard(sys.argv[1])({'a': 1}, 3); "
        "print({'tensorflow', 'torch', 'jax'} & set(sys.modules))"
    )
    done = run_python(code, tmp_path)
    assert done.stdout == "set()\n", done
    assert scalars_in(tmp_path) == {"a": [(3, 1.0)]}
