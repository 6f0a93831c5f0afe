"""What views show, out of metrics: rates, sums, who is slow, and the lines of `horoclone top` at every width."""

from __future__ import annotations

import io
import re

import pytest
from synthetic_metrics import NOW, FixedJob, a_mixed_job, histogram, metrics_of

from horoclone.live.job import Event
from horoclone.live.overview import Observer, end_of, late_seconds, state_of, total, upper_bounds_s
from horoclone.live.rank_metrics import BUCKETS, Late, Operation


def test_rates_are_those_of_the_last_seconds_and_shares_those_of_the_last_step() -> None:
    observer = Observer(FixedJob([]))
    first = observer.digest([metrics_of(0, now=NOW)], [])
    assert first.rows[0].bytes_per_s is None and first.bytes_per_s is None
    for second in range(1, 20):  # 1 MB a second, then for five seconds nothing
        moved = 4_000_000 + min(second, 14) * 1_000_000
        page = metrics_of(
            0, now=NOW + second, operations={"allreduce": Operation(1, moved, 0, 0, histogram(at1=1))}
        )
        seen = observer.digest([page], [])
        if second == 10:
            assert seen.rows[0].bytes_per_s == pytest.approx(1e6)
    assert seen.rows[0].bytes_per_s == 0
    row = seen.rows[0]
    assert row.steps_per_s == pytest.approx(8) and row.step_s == 0.12
    assert row.communication == pytest.approx(0.05 / 0.12) and row.overlap == pytest.approx(0.6)


def test_without_steps_the_share_is_that_of_the_last_seconds() -> None:
    observer = Observer(FixedJob([]))
    bare = {"step": 0, "step_seconds": 0.0, "step_seconds_smoothed": 0.0, "step_communication_seconds": 0.0}
    observer.digest([metrics_of(0, now=NOW, communication_seconds=1.0, overlapped_seconds=0.5, **bare)], [])
    seen = observer.digest(
        [metrics_of(0, now=NOW + 2, communication_seconds=1.5, overlapped_seconds=0.9, **bare)], []
    )
    assert seen.rows[0].communication == pytest.approx(0.25) and seen.rows[0].overlap == pytest.approx(0.8)
    assert seen.rows[0].steps_per_s is None and seen.step_s is None


def test_a_process_that_takes_the_place_of_another_begins_anew() -> None:
    observer = Observer(FixedJob([]))
    observer.digest([metrics_of(0, pid=1, now=NOW)], [])
    other = metrics_of(0, pid=2, now=NOW + 1, started=NOW + 0.5, operations={})
    assert observer.digest([other], []).rows[0].bytes_per_s is None
    # Another init() of one process
    again = metrics_of(0, pid=2, now=NOW + 2, started=NOW + 1.5, operations={})
    assert observer.digest([again], []).rows[0].bytes_per_s is None


def test_a_rank_that_failed_is_lost_whatever_it_wrote_and_shows_no_rate() -> None:
    assert state_of(metrics_of(0, state="ended", exit_code=1)) == "lost"
    assert state_of(metrics_of(0, state="ended", exit_code=0)) == "ended"
    assert [end_of(code) for code in (None, 3, -9, -1000)] == [
        "gone",
        "exit code 3",
        "SIGKILL",
        "signal 1000",
    ]
    seen = Observer(a_mixed_job(3)).look()
    stalled, lost, runs = seen.rows
    assert (lost.state, lost.note, lost.steps_per_s, lost.communication) == ("lost", "SIGKILL", None, None)
    assert (stalled.state, stalled.note) == ("stalled", "allreduce 'grad.0', for rank 1")
    assert runs.state == "running" and runs.note == "" and runs.operation == "allreduce 'grad.0'"


def test_who_was_waited_for_is_told_once_though_several_saw_it() -> None:
    pages = [metrics_of(0, late=(Late(1, 5, 2.5), Late(2, 1, 0.5))), metrics_of(1, late=(Late(1, 4, 3.0),))]
    assert late_seconds(pages) == {1: 3.0, 2: 0.5}
    seen = Observer(FixedJob(pages)).look()
    assert seen.slowest == 1 and [row.late_s for row in seen.rows] == [0.0, 3.0]


@pytest.mark.parametrize(
    ("seconds", "standing_out"),
    [
        ({1: 1.5}, {1: 0.75}),
        ({1: 0.1}, {}),  # too little
        ({0: 0.8, 1: 0.9, 2: 0.8, 3: 0.7}, {}),  # all are late by turns
        ({0: 0.3, 1: 1.0}, {0: 0.15, 1: 0.5}),
    ],
)
def test_a_rank_stands_out_by_how_long_others_have_waited_for_it_in_the_last_seconds(
    seconds: dict[int, float], standing_out: dict[int, float]
) -> None:
    observer = Observer(FixedJob([]))

    def look(now: float, later: dict[int, float]) -> dict[int, float]:
        late = tuple(Late(rank, 1, 9.0 + later.get(rank, 0.0)) for rank in range(4))
        seen = observer.digest([metrics_of(rank, now=now, late=late) for rank in range(4)], [])
        return {row.rank: row.late_share for row in seen.rows if row.late_share}

    assert look(NOW, {}) == {}, "what was long ago says nothing of now"
    assert look(NOW + 2, seconds) == pytest.approx(standing_out)


def test_what_a_rank_that_just_came_into_sight_has_waited_is_not_of_the_last_seconds() -> None:
    observer = Observer(FixedJob([]))
    late = (Late(1, 9, 9.0),)
    for now in (NOW, NOW + 2):  # rank 0 is not seen in the first look
        ranks = [metrics_of(rank, now=now, late=late if rank == 0 else ()) for rank in range(now == NOW, 3)]
        seen = observer.digest(ranks, [])
        assert not any(row.late_share for row in seen.rows), seen.rows


def test_sums_over_ranks_and_bounds_of_buckets() -> None:
    one = Operation(2, 10, 0.5, 1.0, histogram(at3=2))
    both = total([{"allreduce": one}, {"allreduce": one, "barrier": one}])
    assert both["allreduce"] == Operation(4, 20, 1.0, 2.0, histogram(at3=4)) and both["barrier"] == one
    bounds = upper_bounds_s()
    assert len(bounds) == BUCKETS and bounds[0] == 1e-6 and bounds[3] == 8e-6 and bounds[-1] is None


def test_events_are_new_once() -> None:
    observer = Observer(FixedJob([]))
    first, second = (Event(NOW + at, "stall", f"event {at}", ()) for at in range(2))
    assert observer.digest([], [first]).new_events == (first,)
    assert observer.digest([], [first]).new_events == ()
    seen = observer.digest([], [first, second])
    assert seen.new_events == (second,) and seen.events == (first, second)


# ---- horoclone top, as lines


def lines_of(text, width: int) -> list[str]:
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), width=width, highlight=False, soft_wrap=True, no_color=True
    )
    console.print(text)
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("size", [2, 64])
def test_the_table_fits_the_terminal_and_shows_what_is_wrong(width: int, size: int) -> None:
    table = pytest.importorskip("horoclone.live.top.table", reason="rich is not installed")
    observer = Observer(a_mixed_job(size))
    observer.look()
    seen = observer.look()
    whole = lines_of(table.once(seen, "job 7: python train.py", width), width)
    assert all(len(line) <= width for line in whole), whole
    assert len(whole) == 2 + 1 + 1 + size + 1 + 1
    if width >= 80:
        (lost,) = (line for line in whole if " lost " in line and line.lstrip().startswith("1 "))
        assert "SIGKILL" in lost
        for title in ("RANK", "HOST", "STATE", "STEP/S", "COMM", "OVERLAP", "B/S", "LATE", "LAST"):
            assert title in whole[3]
    if width == 200:
        assert "allreduce 'grad.0', for rank 1" in whole[4] and "4000" in whole[4]
    for height in (6, 24, 100):
        for chosen in (0, size - 1):
            options = table.ViewOptions(chosen=chosen)
            screen = lines_of(table.screenful(seen, "job 7: python train.py", width, height, options), width)
            assert len(screen) <= height and all(len(line) <= width for line in screen), screen
            assert any(re.match(rf" +{chosen} ", line) for line in screen), "the chosen rank is in view"
            assert "q end"[:width] in screen[-1]


def test_numbers_are_short() -> None:
    table = pytest.importorskip("horoclone.live.top.table", reason="rich is not installed")
    assert [table.bytes_text(v) for v in (None, 0, 999, 4000, 80_200_000, 1e18)] == [
        "-", "0", "999", "4k", "80.2M", "1e+03P",
    ]  # fmt: skip
    assert [table.seconds_text(v) for v in (None, 5e-6, 0.0123, 1.5, 6000)] == [
        "-",
        "5us",
        "12.3ms",
        "1.5s",
        "100min",
    ]


# ---- Prometheus


def exposed(pages) -> str:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from horoclone.live.exposition import RanksCollector

    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(RanksCollector(lambda: pages))
    return client.generate_latest(registry).decode()


def test_metrics_have_prometheus_names_and_every_rank() -> None:
    text = exposed(a_mixed_job(64).ranks())
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, family in families.items():
        assert name.startswith("horoclone_") and family.documentation.endswith(".")
        assert not re.search(r"_(ms|us|milliseconds|kb|mb)(_|$)", name)
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{name}_total"}
    assert len(families["horoclone_rank_up"].samples) == 64
    assert sum(sample.value for sample in families["horoclone_rank_up"].samples) == 63
    duration = families["horoclone_operation_duration_seconds"]
    assert duration.type == "histogram"
    counts = [s.value for s in duration.samples if s.name.endswith("_bucket") and s.labels["rank"] == "3"]
    assert counts == sorted(counts) and counts[-1] == 100 and counts[8] == 50


def test_the_last_picture_of_the_dashboard_shows_failed_ranks_as_lost_whatever_they_wrote_before() -> None:
    content = pytest.importorskip("horoclone.live.dashboard.content").Content(
        FixedJob([
            metrics_of(0, 4, state="ended"),  # it shut down in order, and its process failed behind that
            metrics_of(1, 4, state="lost", exit_code=-9),
            metrics_of(2, 4),  # it was last read while it ran
            metrics_of(3, 4, state="ended"),
            metrics_of(4, 4, state="lost", exit_code=1, is_consequence=True),
            metrics_of(5, 4),
        ]),
        "1",
    )  # fmt: skip
    content.look()
    content.end(137, "root cause: rank 1", {0: 1, 1: -9, 2: 0, 3: 0, 5: -15}, [5])
    ranks = content.look()["ranks"]
    assert [one["state"] for one in ranks] == ["lost", "lost", "ended", "ended", "ended", "ended"]
    assert [one["note"] for one in ranks] == ["exit code 1", "SIGKILL", "", "", "exit code 1", "SIGTERM"]
