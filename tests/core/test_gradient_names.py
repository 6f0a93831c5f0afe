"""In which order optimizers begin is in the names of what they reduce, where it is not the order in which they were made."""

from __future__ import annotations

import pytest

from horoclone import gradient_names
from horoclone.gradient_names import Turn


@pytest.fixture(autouse=True)
def in_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_names.current, "runtime", object())


def made(count: int) -> list[Turn]:
    turns = [Turn("a kind") for _ in range(count)]
    for turn in turns:
        turn.announce()
    return turns


def test_the_order_in_which_they_were_made_needs_no_name() -> None:
    first, second = made(2)
    assert [first.name(), second.name(), first.name(), second.name()] == ["", "", "", ""]


def test_another_order_has_one() -> None:
    first, second, third = made(3)
    assert second.name(begins=False) == second.name() != ""
    names = [second.name(), first.name(), third.name()]
    assert [name.split(".")[1:3] for name in names] == [["order", "1"], ["order", "2"], ["order", "3"]]
    assert len({name.split(".")[3] for name in names}) == 3 and second.name() == names[0]


def test_one_that_was_a_copy_counts_no_more() -> None:
    first, second = made(2)
    first.withdraw()
    assert second.name() == ""


def test_a_newcomer_to_an_elastic_job_names_as_those_who_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was there has begun with its optimizers long ago, in whatever order."""
    first, second = made(2)
    monkeypatch.setattr(gradient_names.member, "number", lambda: 2)
    assert second.name() == first.name() == ""
