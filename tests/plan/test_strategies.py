"""The strategies that are planned: each as a replay of a known model on known links, the choice between them, and pipelines."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

import pytest

from horoclone import replay, simulate
from horoclone.launch import tool
from horoclone.plan import command, pipelines
from horoclone.plan.costs import Costs, Link
from horoclone.plan.profile import Block, Line, PlanError, Profile, Rates, Sent, Stage
from horoclone.plan.strategies import EXACT, Strategy, Subject, enumerate_strategies, order
from horoclone.plan.table import print_plan, reason

MB = 1e6
OPERATIONS = ("bucket", "bucket16", "allreduce", "reducescatter", "broadcast", "allgather", "alltoall")

HALVED = ("reducescatter", "alltoall")  # a rank of two sends half of its argument


def a_profile(mb: float = 36.0, compute_ms: float = 300.0) -> Profile:
    """Like VGG-16: nearly all parameters in a layer that is read late."""
    step = replay.of_layers(simulate.LAYERS["vgg16"], mb * MB, compute_ms / 1e3, update_s=0.006)
    share = [time for _, time in simulate.LAYERS["vgg16"]]
    blocks = tuple(
        Block(str(i), step.forward_s * share[i], step.backward_s * share[i], gradient.size, 1 * MB)
        for i, gradient in enumerate(step.gradients)
    )
    int8 = tuple(
        (
            Stage((Sent(bucket.size * 4e-10, "alltoall", bucket.size / 4),), 0.0, 0),
            Stage((Sent(bucket.size * 2e-10, "allgather", bucket.size / 8),), 0.0, 1),
            Stage((), bucket.size * 2e-10, -1),
        )
        for bucket in replay.buckets_of(step)
    )
    return Profile(
        gradients=step.gradients, names=tuple("abcdefgh"), forward_s=step.forward_s, backward_s=step.backward_s,
        update_s=step.update_s, copy_s=1e-10, half_s=1e-10, per_bucket_s=5e-5, outer_s=0.02, parameters=mb * MB,
        state=2 * mb * MB, activations=50 * MB, memory_by="a test", blocks=blocks, is_chain=True, optimizer="Adam",
        is_per_parameter=True, compressions={"int8": int8},
    )  # fmt: skip


def some_rates(size: int, local: int, bytes_per_s: float, load: float = 0.0) -> Rates:
    lines = {op: Line(20e-6, (0.5 if op in HALVED else 1.0) / bytes_per_s) for op in OPERATIONS}
    return Rates(size, local, size == local, lines if size > 1 else {}, load, (0.3,) * size)


def planned(profile: Profile, rates: Rates, size: int, per_node: int, link: str = "") -> dict[str, Strategy]:
    costs = Costs(rates, size, per_node, Link.read(link) if link else None)
    return {strategy.name: strategy for strategy in enumerate_strategies(Subject(profile, rates, costs))}


def test_on_a_slow_link_the_steps_are_those_that_were_measured_on_one() -> None:
    strategies = planned(a_profile(), some_rates(2, 1, 0.956e9 / 8), 2, 1)
    step_ms = {name: 1e3 * strategy.timed.step_s for name, strategy in strategies.items()}
    # docs/priority.md: 424 with 318 of computing
    assert step_ms["data parallel"] == pytest.approx(410, rel=0.15)
    assert step_ms["cross_barrier"] < 0.9 * step_ms["data parallel"]
    assert step_ms["DiLoCo, 100"] == pytest.approx(300, rel=0.03)
    assert max(step_ms["int8"], step_ms["fp16"]) < 0.9 * step_ms["data parallel"]
    for strategy in strategies.values():
        assert strategy.timed.step_s >= 0.3 - 1e-9 or strategy.family in ("zero", "fsdp"), strategy.name


def test_where_nothing_has_to_be_sent_every_strategy_takes_what_computing_takes() -> None:
    (alone,) = [
        strategy
        for strategy in planned(a_profile(), some_rates(1, 1, 1.0), 1, 1).values()
        if strategy.family == "data"
    ]
    assert alone.timed.step_s == pytest.approx(0.3 + 36 * MB * 1e-10)
    assert alone.timed.waiting_s == 0


def test_memory_is_that_of_what_each_rank_keeps() -> None:
    profile = a_profile()
    strategies = planned(profile, some_rates(4, 4, 4e9), 4, 4)
    whole = 2 * profile.parameters + profile.state + profile.activations
    assert strategies["data parallel"].memory == whole
    assert strategies["ZeRO-1"].memory == whole - profile.state * 3 / 4
    assert strategies["FSDP2"].memory < strategies["ZeRO-1"].memory < whole < strategies["DiLoCo, 20"].memory


def test_a_rank_that_computes_late_is_what_a_quorum_is_for() -> None:
    slow = dataclasses.replace(some_rates(4, 4, 4e9), compute_s=(0.3, 0.06, 0.06, 0.06))
    strategies = planned(a_profile(), slow, 4, 4)
    assert strategies["quorum 0.75"].timed.step_s < 0.4 * strategies["data parallel"].timed.step_s


def test_the_network_between_hosts_that_are_not_here_is_what_was_given_or_is_called_assumed() -> None:
    rates = some_rates(2, 2, 4e9)
    given, assumed = Costs(rates, 16, 4, Link.read("1gbit,50us")), Costs(rates, 16, 4, None)
    assert given.nodes == 4 and not given.is_measured
    assert any("1 Gbit/s, 50 us (--link)" in one for one in given.assumed)
    assert any("10 Gbit/s" in one and "--link" in one for one in assumed.assumed)
    ring = 2 * 3 / 4 * 8 * MB / (0.95e9 / 8)
    assert dict(given.of("bucket")(8 * MB))["network"] == pytest.approx(ring + 6 * 50e-6)
    assert not Costs(rates, 2, 2, None).assumed
    assert Link.read("100mbit").gbit == pytest.approx(0.1)
    for wrong in ("fast", "10", "-1gbit", "0mbit", "1gbit,xus"):
        with pytest.raises(PlanError, match="--link"):
            Link.read(wrong)


def test_blocks_are_cut_so_that_the_longest_stage_is_shortest() -> None:
    assert pipelines.cut_evenly([1, 1, 1, 1], 2) == [2, 4]
    assert pipelines.cut_evenly([5, 1, 1, 1, 1], 2) == [1, 5]
    assert pipelines.cut_evenly([3, 1, 1, 3], 3) == [1, 3, 4]
    strategies = planned(a_profile(), some_rates(4, 4, 4e9), 4, 4)
    four = strategies["pipeline 4 x data 1, 8 microbatches"]
    assert four.why_not and four.timed.waiting_s > 0


# --- the choice ---


def wish(**more: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args(["x.py:build"])), **more})


def a_plan(**more: object) -> command.Plan:
    rates = some_rates(2, 1, 0.956e9 / 8)
    return command.make_plan(a_profile(), rates, Costs(rates, 2, 1, None), wish(**more))


def test_what_changes_the_result_is_chosen_only_where_that_is_asked_for() -> None:
    plan = a_plan()
    assert plan.chosen.name == "cross_barrier" and plan.chosen.learns == EXACT
    assert any("DiLoCo" in remark and "--approximate" in remark for remark in plan.remarks)
    assert a_plan(approximate=True).chosen.family == "diloco"
    assert a_plan(only="data parallel; ZeRO-1").chosen.name in ("data parallel", "ZeRO-1")


def test_a_limit_of_memory_holds_and_one_that_nothing_keeps_is_explained() -> None:
    plan = a_plan()
    zero = next(strategy for strategy in plan.strategies if strategy.name == "ZeRO-1")
    assert a_plan(memory_gib=(zero.memory + 1) / (1 << 30)).chosen.memory <= zero.memory + 1
    with pytest.raises(
        PlanError, match="no strategy fits into 10 MiB of a rank: the least is .*--memory-gib"
    ):
        a_plan(memory_gib=10 / 1024)
    with pytest.raises(PlanError, match=r"--only: no strategy is called 'warp'. There are: data parallel; "):
        a_plan(only="warp")


def test_of_equally_fast_ways_the_simplest_is_chosen() -> None:
    strategies = enumerate_strategies(
        Subject(a_profile(0.1), some_rates(2, 2, 4e9), Costs(some_rates(2, 2, 4e9), 2, 2, None))
    )
    assert order(strategies, None, False)[0].name == "data parallel"
    plain, few, many = (
        dataclasses.replace(strategies[0], timed=strategies[0].timed._replace(step_s=step_s))
        for step_s in (0.7, 0.5697, 0.5631)
    )
    assert reason(few, plain, [few, many, plain], False).startswith(
        "569.7 ms is within 2 % of the shortest step of the strategies that learn what one process would (563.1 ms), "
        "and the simplest of these: 1.23 times as fast as data parallel (700.0 ms, "
    )
    assert reason(many, plain, [many, few, plain], False).startswith("563.1 ms is the shortest step of the ")


class Told:
    """Ranks that answer what they were told to."""

    speaks = True

    def __init__(self, times: list[float | str]) -> None:
        self._times = times

    def size_of(self, wished: int | None, per_node: int | None) -> tuple[int, int]:
        return 2, 1

    def call(self, name: str, *given: object) -> object:
        if name == "measure":
            return a_profile(), some_rates(2, 1, 0.956e9 / 8)
        asked: object = given[2]
        assert [kind for kind, _ in asked] == ["alone", *["optimizer"] * 3, "alone"]  # type: ignore[attr-defined]
        return [0.301, *self._times, 0.45]


def test_the_measured_best_is_chosen_and_everything_is_printed(tmp_path, capsys) -> None:
    file = tmp_path / "model.py"
    file.write_text("def build(): ...\n")
    arguments = wish(
        what=f"{file}:build",
        validate=3,
        json=str(tmp_path / "plan.json"),
        only="cross_barrier; data parallel; ZeRO-1",
    )
    assert command.main(arguments, Told([0.35, "no memory", 0.34])) == 0
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    third = [strategy for strategy in written["strategies"] if strategy["measured_s"] == 0.34]
    assert written["chosen"] == third[0]["name"] and f"chosen: {third[0]['name']}, because" in said
    assert (
        "could not run: no memory" in " ".join(said.split()) and "340.0" in said and written["write"] in said
    )
    assert "took 300.0 ms when it was measured, and 301.0 and 450.0 ms before and after" in " ".join(
        said.split()
    )
    assert simulate.layers_of(str(tmp_path / "plan.json"))
    with pytest.raises(PlanError, match="none of the strategies could run"):
        command.main(arguments, Told(["a", "b", "c"]))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere.py:build", "-np", "2"], "there is no file nowhere.py"),
        (["{file}", "-np", "2"], "expected FILE.py:FUNCTION"),
        (["{file}:built", "-np", "2"], "model.py has no function 'built'; it has build."),
        (["{file}:build"], "for how many ranks? Give -np N"),
        (["{file}:build", "-np", "0"], "-np 0: must be at least 1"),
        (["{file}:build", "-np", "2", "--link", "slow"], "--link slow: expected"),
        (["{file}:build", "-np", "2", "-H", "a:b:c"], "a:b:c"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words, text, tmp_path, capfd) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("rich", reason="rich is not installed")
    file = tmp_path / "model.py"
    file.write_text("def build(): pass\nopen(__file__ + '.ran', 'w')\n")
    assert tool.main(["plan", *[word.format(file=file) for word in words]]) == 2
    assert text in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["model.py"], "which may be the whole training"


def test_what_is_printed_begins_with_the_answer_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plan(a_plan(), every_strategy=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chosen: cross_barrier, because ")
    code = [line for line in lines if line.startswith("    ")]
    assert all(len(line) <= 80 for line in lines if line not in code), lines
