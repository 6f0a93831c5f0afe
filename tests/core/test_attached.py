"""Native libraries of bindings are told where the runtime is, after each init, and that it is gone, before each shutdown."""

from __future__ import annotations

from horoclone import runtime
from horoclone.runtime.attached import attach
from horoclone.runtime.lifecycle import init, shutdown


def test_a_setter_hears_of_every_life_and_of_one_that_has_begun() -> None:
    early: list[int] = []
    late: list[int] = []
    attach(early.append)
    assert early == []
    for _ in range(2):
        init()
        assert early[-1] == runtime.native().address != 0
        attach(late.append)
        assert late[-1] == early[-1]
        shutdown()
        assert early[-1] == late[-1] == 0
    assert [bool(address) for address in early] == [True, False, True, False]
