"""A replayed step takes as long as the measured one, and the replay cuts buckets and uses links as the runtime does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horoclone import replay
from horoclone.replay import Compute, Mark, Send, Wait
from horoclone.simulate import LAYERS, step_ms

ROOT = Path(__file__).resolve().parents[2]
LINE = 0.956  # of the nominal rate: what plain sockets carry over the cable of docs/decisions/priorities.md
NAMES = {"VGG-16": "vgg16", "ResNet-50": "resnet50"}
ROW = (
    r"\| like (?P<name>[\w-]+), (?P<mb>\d+) MB(?:, (?P<gbit>\d+) Gbit/s)? \| (?P<compute>\d+) ms \| \d+ ms"
    r" \| (?P<ordinary>\d+) ms [^|]*\| (?P<crossing>\d+) ms [^|]*\|"
)


def measured() -> list[dict[str, str]]:
    page = (ROOT / "docs" / "decisions" / "priorities.md").read_text()
    found = [match.groupdict() for match in re.finditer(ROW, page)]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(
    "row", measured(), ids=lambda row: f"{row['name']} {row['mb']} MB {row['gbit'] or 1}"
)
@pytest.mark.parametrize("way", ["ordinary", "crossing"])
def test_a_step_takes_within_15_percent_of_what_was_measured(row: dict[str, str], way: str) -> None:
    predicted = step_ms(
        2, ranks_per_node=1, gradient_mb=float(row["mb"]), compute_ms=float(row["compute"]),
        link_gbit=LINE * float(row["gbit"] or 1), local_gb_s=8.0, latency_us=20.0, agreement_us=30.0,
        layers=LAYERS[NAMES[row["name"]]], cross_barrier=way == "crossing"
    )  # fmt: skip
    assert predicted == pytest.approx(float(row[way]), rel=0.15)


def steps(*body: object, count: int = replay.STEPS) -> list[object]:
    return [op for _ in range(count) for op in (*body, Mark())]


def test_what_is_sent_under_computing_costs_nothing_and_the_rest_is_waited_for() -> None:
    hidden = steps(Send("a", [("net", 2.0)]), Compute(3.0), Wait("a"))
    assert replay.replay(hidden) == pytest.approx((3.0, 0.0))
    late = steps(Compute(3.0), Send("a", [("net", 2.0)]), Wait("a"))
    assert replay.replay(late) == pytest.approx((5.0, 2.0))


def test_a_level_that_takes_the_processor_delays_computing() -> None:
    program = steps(Send("a", [("node", 2.0)]), Compute(3.0), Wait("a"))
    assert replay.replay(program, {"node": 0.5}).step_s == pytest.approx(4.0)
    assert replay.replay(program, {"node": 1.0}).step_s == pytest.approx(5.0)


def test_levels_work_side_by_side_and_each_carries_one_piece_at_a_time() -> None:
    stages = [("node", 1.0), ("network", 2.0)]
    both = steps(Send("a", stages), Send("b", stages), Wait("a"), Wait("b"))
    assert replay.replay(both).step_s == pytest.approx(1.0 + 2.0 + 2.0)


def test_an_urgent_piece_goes_between_the_parts_of_a_large_one_but_overtakes_no_more_than_two() -> None:
    large, urgent = Send("large", [("net", 10.0)], 0, 10), Send("urgent", [("net", 1.0)], 5)
    program = steps(large, Compute(0.5), urgent, Wait("urgent"), Wait("large"))
    timed = replay.replay(program)
    assert timed.step_s == pytest.approx(11.0)
    first = steps(large, Compute(0.5), urgent, Wait("urgent"), Compute(100.0), Wait("large"))
    assert replay.replay(first).waiting_s == pytest.approx(2.5)  # two parts, less half a second, and its own
    whole = steps(
        Send("large", [("net", 10.0)]), Compute(0.5), urgent, Wait("urgent"), Compute(100.0), Wait("large")
    )
    assert replay.replay(whole).waiting_s == pytest.approx(10.5)


def test_a_program_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for 'b'"):
        replay.replay(steps(Send("a", [("net", 1.0)]), Wait("b")))
    with pytest.raises(ValueError, match="has 2 steps"):
        replay.replay(steps(Compute(1.0), count=2))


def test_buckets_are_cut_as_the_optimizer_cuts_them() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from horoclone.torch.optimizer import buckets

    assert (replay.FIRST_BUCKET_BYTES, replay.BUCKET_BYTES, replay.URGENT_BUCKET_BYTES) == (
        buckets.FIRST_BUCKET_BYTES,
        buckets.BUCKET_BYTES,
        buckets.URGENT_BUCKET_BYTES,
    )
    assert replay.PART_BYTES == 1 << 20
    assert "partition_bytes, kMiB" in (ROOT / "csrc/base/settings_table.h").read_text()
    chance = torch.Generator().manual_seed(3)
    for limit in (replay.BUCKET_BYTES, replay.URGENT_BUCKET_BYTES):
        sizes = [int(10 ** float(torch.rand(1, generator=chance) * 7)) for _ in range(60)]
        states = [buckets.GradState(torch.empty(size, device="meta"), str(i)) for i, size in enumerate(sizes)]
        real = buckets.plan_buckets([states], [], lambda state: state.parameter.dtype, limit)
        ours = replay.cut([4 * size for size in sizes], replay.FIRST_BUCKET_BYTES, limit)
        assert [[int(state.name) for state in one] for _, one in real] == ours


def test_groups_have_equal_numbers_of_gradients() -> None:
    step = replay.of_layers([(1, 1)] * 7, 7e6, 0.7)
    assert [len(bucket.members) for bucket in replay.buckets_of(step, groups=3)] == [3, 2, 2]
