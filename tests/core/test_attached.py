"""Native libraries of bindings are told where the runtime is, after each init, and that it is gone, before each shutdown."""

from __future__ import annotations

from horoclone import runtime


def test_a_setter_hears_of_every_life_and_of_one_that_has_begun() -> None:
    early: list[int] = []
    late: list[int] = []
    runtime.attach(early.append)
    assert early == []
    for _ in range(2):
        runtime.init()
        assert early[-1] == runtime.native().address != 0
        runtime.attach(late.append)
        assert late[-1] == early[-1]
        runtime.shutdown()
        assert early[-1] == late[-1] == 0
    assert [bool(address) for address in early] == [True, False, True, False]
