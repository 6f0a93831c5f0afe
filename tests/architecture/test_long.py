"""Which of the tests marked `long` run in a slice of time (conftest.py)."""

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
