"""Why a rank is late: decided from figures, told from stacks, shown for a real job (the trial is in test_why_trial.py)."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from synthetic_metrics import NOW, FixedJob, metrics_of
from world import ran, until

import horoclone
from horoclone.live import job, late_ranks, rank_metrics
from horoclone.live.overview import Observer
from horoclone.live.phases import FIGURES, Phases, packed, unpacked
from horoclone.live.top.table import ViewOptions, headline, screenful
from horoclone.runtime import phase_sampler
from horoclone.runtime.phase_sampler import Classifier

HOROCLONE = Path(sys.executable).with_name("horoclone")
# Of 10 s in which a rank computed 4 and waited 6.
USUAL = {
    "elapsed": 10.0, "steps": 200.0, "waited": 6.0, "transfer": 0.5, "ran": 3.8, "delayed": 0.2,
    "data": 0.5, "forward": 1.5, "backward": 1.5, "optimizer": 0.5,
}  # fmt: skip


def phases_of(now: str = "communication", now_seconds: float = 0.01, **different: float) -> Phases:
    figures = {**dict.fromkeys(FIGURES, 0.0), **USUAL, **different}
    return Phases(
        NOW, figures, figures, {"data": "train.py:41 in load"}, now, now_seconds, "train.py:41 in load"
    )


def cause_of(**different: float) -> list[tuple[int, str]]:
    """Of a job in which rank 2 differs."""
    ranks = dict.fromkeys(range(4), phases_of())
    ranks[2] = phases_of(**different)
    return [(one.rank, one.cause) for one in late_ranks.reasons(ranks)]


@pytest.mark.parametrize(
    ("cause", "different"),
    [
        ("data", {"waited": 2.0, "data": 4.5}),
        ("forward", {"waited": 2.0, "forward": 5.5, "ran": 7.6, "delayed": 0.4}),
        ("backward", {"waited": 2.0, "backward": 5.5}),
        ("optimizer", {"waited": 2.0, "optimizer": 4.5}),
        ("checkpoint", {"waited": 2.0, "checkpoint": 4.0}),
        ("own code", {"waited": 2.0, "own code": 4.0}),
        ("gc", {"waited": 2.0, "gc": 3.9, "backward": 5.4}),
        ("faults", {"waited": 2.0, "faults": 3.5, "faults_major": 900.0, "data": 4.5}),
        ("throttled", {"waited": 2.0, "throttled": 3.8, "delayed": 3.9, "forward": 3.5, "backward": 3.5}),
        ("delayed", {"waited": 2.0, "delayed": 4.1, "forward": 3.5, "backward": 3.5}),
        ("stopped", {"waited": 6.0, "stopped": 4.0, "stopped_waiting": 4.0}),
        ("link", {"transfer": 5.0, "link": 5.0}),
    ],
)
def test_the_cause_is_what_exceeds_the_others(cause, different):
    if cause == "link":  # data move for long everywhere; they lie on one link
        ranks = {rank: phases_of(transfer=5.0, link=0.2) for rank in range(4)}
        ranks[2] = phases_of(**different)
        ranks[1] = phases_of(transfer=5.0, link=2.4)  # acknowledgements wait behind what rank 2 sends
        assert [(one.rank, one.cause) for one in late_ranks.reasons(ranks)] == [(2, "link")]
    else:
        assert cause_of(**different) == [(2, cause)]


def test_nobody_is_late_who_differs_by_little_or_was_measured_for_a_moment():
    assert cause_of() == [] and cause_of(waited=5.0, data=1.5) == []
    assert cause_of(elapsed=4.0, waited=0.5, data=3.0) == []
    assert late_ranks.reasons({0: phases_of()}) == []


def test_who_computes_more_on_a_processor_that_all_share_has_not_other_processes_on_it():
    busy = {"ran": 1.0, "delayed": 1.0, "waited": 8.0}
    ranks = dict.fromkeys(range(4), phases_of(**busy))
    ranks[1] = phases_of(ran=3.0, delayed=3.0, waited=4.0, checkpoint=4.0)
    assert [(one.rank, one.cause) for one in late_ranks.reasons(ranks)] == [(1, "checkpoint")]


def test_a_reason_has_its_figure_its_line_and_advice():
    ranks = {0: phases_of(), 1: phases_of(waited=2.0, data=4.5)}
    (one,) = late_ranks.reasons(ranks)
    assert str(one) == "data loading, 20 ms a step more than others (40%), mostly at train.py:41 in load"
    assert one.step_seconds == pytest.approx(0.02) and "workers" in one.advice
    assert all(name and "\n" not in advice for name, advice in late_ranks.CAUSES.values())


def test_what_a_rank_publishes_is_read_whole_or_not_at_all():
    made = phases_of(data=1 / 3)
    content = packed(made)
    read = unpacked(content.ljust(4096, b"\0"))
    assert (
        read is not None and read.lines == made.lines and read.total["data"] == pytest.approx(1 / 3, abs=1e-4)
    )
    assert unpacked(b"") is None and unpacked(bytes(4096)) is None
    assert unpacked(content[:40] + b"x" + content[41:]) is None and unpacked(content[:-1]) is None
    for letter in ("x", "é", "\U0001f600", "\udcff", '"', "\n"):
        long = dict.fromkeys(late_ranks.CAUSES, letter * 5000)
        content = packed(Phases(NOW, USUAL, USUAL, long, "data", 1.0, letter * 5000))
        assert len(content) <= 4096, letter
        read = unpacked(content)
        assert read is not None and rank_metrics.printable_phases(read).now_line


def test_in_a_stall_the_culprit_is_marked_and_nobody_who_waits_for_it():
    late = {"last_operation": None}
    waiting = {"phases": phases_of("communication", 20.0), "state": "waiting"}
    ranks = [metrics_of(rank, 4, **late, **waiting) for rank in range(4)]
    assert late_ranks.culprits(ranks) == {}  # all of them wait: that is a deadlock, and told elsewhere
    ranks[3] = metrics_of(3, 4, **late, phases=phases_of("data", 20.0))
    assert late_ranks.culprits(ranks) == {3: "in data loading for 20 s at train.py:41 in load"}
    seen = Observer(FixedJob(ranks)).look()
    rows = seen.rows
    assert [row.is_culprit for row in rows] == [False, False, False, True]
    # Rank 1, for which they have waited longest so far, is not the one.
    assert "held up by: rank 3" in headline(seen, "job 1", 200).plain
    assert rows[3].note.startswith("holds up the others: in data loading") and not rows[0].note
    # Nobody had waited for it before, and the core sums up waits that are over.
    ranks[0] = metrics_of(
        0, 4, last_operation=rank_metrics.LastOperation("allreduce", "x", 4, 20.0), **waiting
    )
    seen = Observer(FixedJob(ranks)).look()
    assert seen.rows[3].late_s == 20.0
    for options, rank in ((ViewOptions(), 3), (ViewOptions(chosen=1), 1)):
        assert f"s stacks of rank {rank}  " in screenful(seen, "job 1", 200, 24, options).plain
    ranks[3] = metrics_of(3, 4, **late, state="stalled", is_stopped=True, stalled_on="the process is stopped")
    assert "stopped" in late_ranks.culprits(ranks)[3]


def test_without_phases_it_is_who_the_others_name():
    stalled = {"state": "stalled", "is_stalled": True, "stalled_on": "allreduce 'x'", "stalled_for": (1, 2)}
    also_waits = {**stalled, "stalled_for": (2,)}
    ranks = [metrics_of(0, 3, **stalled), metrics_of(1, 3, **also_waits), metrics_of(2, 3)]
    assert late_ranks.culprits(ranks) == {2: "has not come"}


def test_stale_figures_are_blank():
    old = metrics_of().last_operation
    still = metrics_of(1, 2, last_operation=type(old)("allreduce", "x", 4, 20.0))
    rows = Observer(FixedJob([metrics_of(0), still])).look().rows
    assert rows[0].steps_per_s and rows[1].steps_per_s is None and rows[1].communication is None
    assert rows[0].step_s and rows[1].step_s is None
    late = {"waited": 2.0, "data": 4.5}
    job_of = [metrics_of(rank, 2, phases=phases_of(**(late if rank else {}))) for rank in range(2)]
    assert [one.rank for one in late_ranks.of_ranks(job_of)] == [1]
    aged = [
        metrics_of(0, 2, phases=phases_of()),
        metrics_of(1, 2, phases=phases_of(**late), phases_age_seconds=9.0),
    ]
    assert late_ranks.of_ranks(aged) == []


def where_is(body):
    """What the classifier says of this thread, from inside `body(look)`."""
    found = []
    body(lambda: found.append(Classifier()(sys._getframe())))
    return found[0][0]


def test_a_stack_tells_the_phase():
    torch = pytest.importorskip("torch")

    class Loaded(torch.utils.data.Dataset):
        def __init__(self, look):
            self.look = look

        def __len__(self):
            return 1

        def __getitem__(self, index):
            self.look()
            return torch.ones(1)

    class Model(torch.nn.Module):
        def __init__(self, look):
            super().__init__()
            self.look = look

        def forward(self, x):
            self.look()
            return x

    def backward(look):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: look())
        x.sum().backward()

    def optimizer(look):
        made = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
        made.register_step_post_hook(lambda *_: look())
        made.step()

    def save(look):
        class Watched:
            def __reduce__(self):
                look()
                return (int, ())

        torch.save(Watched(), os.devnull)

    def generated(look):
        def batches():
            look()
            yield 1

        list(batches())

    assert where_is(lambda look: list(torch.utils.data.DataLoader(Loaded(look)))) == "data"
    assert where_is(lambda look: Model(look)(torch.ones(1))) == "forward"
    assert where_is(backward) == "backward"
    assert where_is(optimizer) == "optimizer"
    assert where_is(save) == "checkpoint"
    assert where_is(generated) == "data"
    assert where_is(lambda look: look()) == "own code"


@pytest.mark.parametrize(
    ("ours", "phase"),
    [
        (one, "own code")
        for one in ("elastic/run.py", "elastic/variables.py", "launch/call.py", "ray/worker.py")
    ]
    + [("arrays/handles.py", "communication")],
)
def test_an_installed_program_that_horoclone_calls_is_no_communication(ours, phase):
    caller = Path(horoclone.__file__).parent / ours
    assert caller.exists()
    program = Path(sysconfig.get_path("purelib"), "trainer", "loop.py")
    names = {"sys": sys}
    exec(compile("def train(classify): return classify(sys._getframe())", program, "exec"), names)
    exec(compile("def call(function, *arguments): return function(*arguments)", caller, "exec"), names)
    assert names["call"](names["train"], Classifier())[0] == phase


def test_what_throttles_counts_no_more_than_has_passed(tmp_path, monkeypatch):
    stat = tmp_path / "cpu.stat"
    monkeypatch.setattr(phase_sampler, "_cgroups", lambda: [str(tmp_path)])
    stat.write_text("nr_throttled 1\nthrottled_usec 1000000\n")
    throttling = phase_sampler._Throttling()
    assert throttling.seconds(1.0) == 0
    stat.write_text("nr_throttled 2\nthrottled_usec 1400000\n")
    assert throttling.seconds(1.0) == pytest.approx(0.4)
    stat.write_text("nr_throttled 9\nthrottled_usec 5400000\n")  # of four processors
    assert throttling.seconds(1.0) == pytest.approx(1.4)


def test_what_nobody_asks_for_loads_nothing(launch):
    program = (
        "import sys, horoclone as hvd; hvd.init(); assert hvd.metrics()['why'] is None; hvd.shutdown(); "
        "assert 'horoclone.runtime.phase_sampler' not in sys.modules"
    )
    assert (
        "late"
        not in launch([HOROCLONE.with_name("horoclonerun"), "-np", "2", sys.executable, "-c", program]).output
    )


PROGRAM = """
import pathlib, sys, time
import numpy as np
import horoclone as hvd

folder = pathlib.Path(sys.argv[1])

def slow():
    time.sleep(0.1)  # far more than a busy machine takes from the others

def reached(name):
    return bool(hvd.allreduce(np.float32((folder / name).exists()), name=name, op=hvd.Sum))

hvd.init()
rank = hvd.rank()
while not reached("stall"):
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    if rank == 1:
        slow()
    if rank == 0:
        (folder / "new").write_text("\\n".join(one["text"] for one in hvd.metrics()["why"]))
        (folder / "new").rename(folder / "why")
while rank == 3 and not (folder / "end").exists():
    time.sleep(0.01)
hvd.allreduce(np.ones(1), name="last")
hvd.shutdown()
"""


def test_a_job_says_why_while_it_runs_in_a_stall_and_at_its_end(launch, tmp_path):
    pytest.importorskip("rich", reason="rich is not installed: pip install '.[top]'")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [
        HOROCLONE.with_name("horoclonerun"),
        "--why",
        "-np",
        "4",
        sys.executable,
        tmp_path / "train.py",
        tmp_path,
    ]
    started = launch.start(command)

    def said():
        assert started.process.poll() is None, started.stderr
        text = (tmp_path / "why").read_text() if (tmp_path / "why").exists() else ""
        return "slow" in text

    until(said, 60)
    found = {one.rank: one for one in late_ranks.of_ranks(job.find(str(started.process.pid)).ranks())}
    assert {rank: one.cause for rank, one in found.items()} == {1: "own code"}
    assert found[1].line.endswith("in slow") and found[1].step_seconds > 0.005
    shown = ran(HOROCLONE, "top", str(started.process.pid), "--once", check=True).stdout
    assert "rank 1 is late: the program's own code" in shown, shown
    (tmp_path / "stall").touch()
    culprits = until(lambda: late_ranks.culprits(job.find(str(started.process.pid)).ranks()), 60)
    assert list(culprits) == [3] and "train.py" in culprits[3], culprits
    (tmp_path / "end").touch()
    done = started.finish(60)
    assert done.returncode == 0, done.output
    assert "rank 1 was late: the program's own code" in done.stderr, done.output
    assert "rank 0 was" not in done.stderr, done.output
