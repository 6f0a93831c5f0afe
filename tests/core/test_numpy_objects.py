"""broadcast_object and allgather_object, and that nothing else unpickles."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys

import pytest
from world import ranks

import horoclone as hvd

THINGS = [None, 7, "text", [1, {"a": (2, 3)}], b"x" * 300_000]


@ranks(3)
def test_objects_are_broadcast_from_every_root():
    for root in range(hvd.size()):
        for thing in THINGS:
            given = thing if hvd.rank() == root else "other"
            assert hvd.broadcast_object(given, root) == thing
            assert hvd.broadcast_object(given, root, name="state") == thing


@ranks(3)
def test_objects_are_gathered_by_rank():
    gathered = hvd.allgather_object({"rank": hvd.rank(), "data": "x" * (1000 * hvd.rank())})
    assert [one["rank"] for one in gathered] == list(range(hvd.size()))
    assert [len(one["data"]) for one in gathered] == [1000 * rank for rank in range(hvd.size())]
    assert hvd.allgather_object(None, name="nothing") == [None] * hvd.size()


@ranks(2)
def test_functions_travel_too():
    factor = 3
    tripled = hvd.broadcast_object((lambda x: factor * x) if hvd.rank() == 0 else None)
    assert tripled(14) == 42
    assert hvd.broadcast_object_fn(root_rank=1)(hvd.rank()) == 1
    assert hvd.allgather_object(functools.partial(max, 3))[1](2) == 3


@ranks(2)
def test_classes_of_the_script_are_those_of_the_rank_that_reads():
    """cloudpickle sends them by their content, and `found is Phase.TRAIN` would be False on all ranks but the root."""
    Phase = enum.Enum("Phase", ["TRAIN", "TEST"], module="__main__")
    Config = dataclasses.make_dataclass("Config", ["phase", "sizes"], namespace={"__module__": "__main__"})
    Config.__module__ = "__main__"
    script = sys.modules["__main__"]
    script.Phase, script.Config = Phase, Config
    try:
        for got in (
            hvd.broadcast_object(Config(Phase.TRAIN, [hvd.rank()])),
            hvd.allgather_object(Config(Phase.TRAIN, [hvd.rank()]))[0],
        ):
            assert got.phase is Phase.TRAIN and type(got) is Config and got == Config(Phase.TRAIN, [0])
        if hvd.rank() == 1:
            del script.Config  # of a rank that has no such class
        got = hvd.broadcast_object(Config(Phase.TEST, []))
        assert got.phase is Phase.TEST and type(got).__name__ == "Config"
        script.Rates = type("Rates", (), {"__module__": "__main__", "lr": 0.5 if hvd.rank() == 0 else 0.1})
        assert hvd.broadcast_object(script.Rates).lr == hvd.broadcast_object(script.Rates()).lr == 0.5
        assert script.Rates.lr == (0.5 if hvd.rank() == 0 else 0.1)
        assert (type(got) is Config) == (hvd.rank() == 0)
    finally:
        del script.Phase
        for name in ("Config", "Rates"):
            vars(script).pop(name, None)


@ranks(2)
def test_an_object_that_cannot_be_pickled_is_the_callers_error():
    with pytest.raises(TypeError, match="pickle"):
        hvd.allgather_object(one for one in "generator")
    assert hvd.allgather_object(1) == [1, 1]


@ranks(3)
def test_an_object_of_one_rank_that_cannot_be_pickled_is_everybodys_error():
    """The others would wait for ever if that rank raised before it has told them."""
    given = (one for one in "generator") if hvd.rank() == 1 else "fine"
    for call in (hvd.allgather_object, lambda obj: hvd.broadcast_object(obj, root_rank=1)):
        with pytest.raises(TypeError if hvd.rank() == 1 else ValueError, match="pickle.*generator") as raised:
            call(given)
        assert hvd.rank() == 1 or "rank 1 raised TypeError: " in str(raised.value)
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]
    assert hvd.broadcast_object(given if hvd.rank() != 1 else "again", root_rank=1) == "again"
