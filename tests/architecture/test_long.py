"""Which of the tests marked `long` run in a slice of time, and which values of what takes turns (conftest.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


def item(name: str, seconds: float) -> Any:
    mark = pytest.mark.long(seconds).mark
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark)


def test_every_long_test_has_its_turn_and_the_time_is_kept(request: pytest.FixtureRequest) -> None:
    choose = request.config.pluginmanager.getplugin(str(CONFTEST)).choose_long
    items = [item(f"test_{number}", 10 * (number % 7 + 1)) for number in range(100)]
    seen = set()
    for commit in map(str, range(100)):
        chosen = choose([*items, item("longer than the time", 300)], 240, commit)
        again = choose([*reversed(items), item("longer than the time", 300)], 240, commit)
        assert again == chosen, "the order of collection does not matter"
        assert 200 < sum(one.get_closest_marker("long").args[0] for one in chosen) <= 240
        seen.update(one.nodeid for one in chosen)
    assert seen == {one.nodeid for one in items}


def test_every_value_has_its_turn_and_no_group_is_left_out(request: pytest.FixtureRequest) -> None:
    choose = request.config.pluginmanager.getplugin(str(CONFTEST)).choose_in_turn

    def parametrized(backend: str, body: str, *names: str) -> Any:
        return SimpleNamespace(
            nodeid=f"test_{len(names)}[{backend}-{body}]",
            get_closest_marker=lambda _: pytest.mark.in_turn(*names).mark,
            callspec=SimpleNamespace(params={"backend": backend, "body": body}),
        )

    values = [(backend, body) for backend in "abc" for body in "xy"]
    items = [parametrized(*pair, "backend") for pair in values] + [parametrized(*pair) for pair in values]
    seen = set()
    for turn in map(str, range(60)):
        chosen = [one.nodeid for one in choose(items, turn)]
        assert sorted(one.nodeid for one in choose(items[::-1], turn)) == sorted(chosen)
        assert [sum(one.startswith(f"test_{n}[") for one in chosen) for n in (0, 1)] == [1, 2]
        assert {one[-2] for one in chosen if one.startswith("test_1[")} == {"x", "y"}
        seen.update(chosen)
    assert seen == {one.nodeid for one in items}
