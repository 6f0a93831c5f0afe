"""What Horovod computed, case by case, is what comes out here: the recorded table, on real ranks.

A case that differs must be covered by tests/horovod_results/deliberate.yaml, which docs/from_horovod.md prints. By hand:
`python tests/horovod_results/compare.py torch-2 'torch[.]allreduce'`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from world import load

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow

table = load(HERE / "table.py", "table")
compare = load(HERE / "compare.py", "compare")
COVERED: dict[str, set[str]] = {}
RAN: set[str] = set()  # cases, with the label of their suite


@pytest.fixture(scope="module", autouse=True)
def no_rank_is_left() -> Iterator[None]:
    yield
    compare.end_ranks()


# With TensorFlow each case builds functions or models anew: a part of one suite at a time. Neighbouring cases, which are
# much alike, are in different parts.
PARTS = {"torch-2": 2, "torch-3": 2, "tf-2": 3, "tf-3": 3, "tf-keras-2": 3, "tf-keras-3": 3}


def parts(begin: str) -> list[tuple[str, int]]:
    """Suites whose names begin like that, once for each of their parts."""
    labels = [suite.label for suite in table.suites() if suite.label.startswith(begin)]
    return [(label, part) for label in labels for part in range(PARTS.get(label, 1))]


def equal_or_listed(label: str, part: int) -> None:
    whole = next(each for each in table.suites() if each.label == label)
    suite = dataclasses.replace(whole, cases=whole.cases[part :: PARTS.get(label, 1)])
    among = compare.entries()
    compared = compare.compare(suite, among=among)
    RAN.update(f"{label} {case['id']}" for case in suite.cases)
    for entry in among:
        COVERED.setdefault(entry.key, set()).update(entry.covered)
    print(f"{label}: {len(compared.equal)} equal, {len(compared.listed)} listed")
    assert not compared.neither, "\n" + "\n".join(str(each) for each in compared.neither)
    assert len(compared.equal) + len(compared.listed) == sum(not each.get("unstable") for each in suite.cases)


@pytest.mark.in_turn("part")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label, part", parts("torch"))
def test_every_case_of_torch_is_equal_or_listed(label: str, part: int) -> None:
    equal_or_listed(label, part)


@pytest.mark.in_turn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label, part", parts("tf"))
def test_every_case_of_tensorflow_is_equal_or_listed(label: str, part: int) -> None:
    equal_or_listed(label, part)


def test_no_entry_of_the_list_is_idle() -> None:
    """Of the entries whose every case has run; `pytest tests/horovod_results` runs all."""
    if not RAN:
        pytest.skip("the tests before this one did not run")
    cases = [(suite.label, case["id"]) for suite in table.suites() for case in suite.cases]
    idle = []
    for entry in compare.entries():
        named = {f"{label} {case}" for label, case in cases if entry.names(label, case)}
        if named <= RAN and not COVERED[entry.key] and entry.says.get("recorded", True):
            idle.append(entry.key)
    assert not idle, f"these entries of deliberate.yaml cover no case any more: {idle}"


def test_a_wrong_value_is_seen() -> None:
    """The comparison itself: values, dtypes, shapes, kinds, classes of errors, a runtime that is broken afterwards."""

    def differs(theirs: dict[str, Any], ours: dict[str, Any]) -> Any:
        return compare.differs(
            table.Suite("torch", 2, False, [], []), {"id": "a", "all": theirs}, [{"a": ours}, {"a": ours}]
        )

    def tensor(values: list[Any], dtype: str = "float32", shape: list[int] | None = None) -> dict[str, Any]:
        return {"out": {"torch": dtype, "shape": shape or [len(values)], "v": values}, "after": "works"}

    one = {"out": tensor([1.0, 2.0])["out"]}
    assert differs(one, tensor([1.0, 2.0])) is None
    assert differs(one, tensor([1.0, 2.0 + 1e-6])) is None
    assert differs(one, tensor([1.0, 2.001])).where == ".v"
    assert differs(one, tensor([1.0, 2.0], "float64")) is not None
    assert differs(one, tensor([1.0, 2.0], shape=[1, 2])) is not None
    assert differs(one, {**tensor([1.0, 2.0]), "after": [3.0]}).where == ".after"
    assert differs({"out": {"torch": "int32", "shape": [1], "v": [2]}}, tensor([2.0], "int32")) is not None
    failed = {"error": ["ValueError", "Exception"]}
    assert differs(failed, {"error": ["MyError", "ValueError", "Exception"], "after": "works"}) is None
    assert differs(failed, {"error": ["RuntimeError", "Exception"], "after": "works"}) is not None
    assert differs(failed, tensor([1.0])).kinds == ("error", "value")
    assert differs({"out": [1, None]}, {"out": [1, None], "after": "works"}) is None
    assert differs({"out": [1, None]}, {"out": (1, None), "after": "works"}) is not None


def test_the_page_prints_the_list() -> None:
    maker = load(HERE.parent.parent / "docs" / "make_differences.py", "make_differences")
    assert maker.PAGE.read_text() == maker.page(), "run `make docs`"
