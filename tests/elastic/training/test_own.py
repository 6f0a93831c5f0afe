"""What a state has of this rank alone, in one process: packed, restored, and refused where it cannot be."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from horoclone.elastic.randomness import RandomStates
from horoclone.elastic.state import ObjectState
from horoclone.objects import packed, unpacked
from horoclone.owned import Owned


def a_state(**attributes: Any) -> ObjectState:
    return ObjectState(lambda obj: obj, lambda: 0, **attributes)


def test_a_pack_gives_everything_back_and_copies_arrays_once() -> None:
    chance = np.random.default_rng(5)
    for count in range(6):
        arrays = [chance.standard_normal(chance.integers(0, 50, size=i % 3)) for i in range(count)]
        value = {"arrays": arrays, "other": [1, "two", None], "shared": arrays[:1] * 2}
        data = packed(value)
        assert data.dtype == np.uint8 and data.nbytes < 4000 + sum(one.nbytes + 64 for one in arrays)
        found = unpacked(data.copy())
        assert found["other"] == [1, "two", None]
        for a, b in zip(found["arrays"], arrays, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.flags.writeable


def test_an_owned_value_is_restored_and_never_sent() -> None:
    def broadcast(obj: Any) -> Any:
        assert obj in ({"epoch": 0}, (0, 0, 0))  # attributes, and the notices of a commit
        return obj

    state = ObjectState(broadcast, lambda: 0, loader=Owned({"at": [0]}), epoch=0)
    state.sync()
    state.loader.value["at"].append(1)
    state.commit()
    state.loader.value["at"].append(2)
    state.restore()
    assert state.loader.value == {"at": [0, 1]} and state.pieces("loader") == []
    state.loader.value["at"].append(9)  # a restored value is no committed one
    state.restore()
    assert state.loader.value == {"at": [0, 1]}
    with pytest.raises(KeyError, match="none of what this state was given as Owned"):
        state.pieces("epoch")
    state.loader = {"at": []}
    with pytest.raises(TypeError, match=r"set state\.loader\.value, or assign another Owned"):
        state.commit()


def test_random_numbers_go_on_where_the_commit_was() -> None:
    torch = pytest.importorskip("torch")
    own = (
        random.Random(3),
        np.random.default_rng(4),
        torch.Generator().manual_seed(5),
        np.random.RandomState(6),
    )
    state = a_state(all=RandomStates(), own=RandomStates(*own))

    def draw() -> list[float]:
        return [
            random.random(), float(np.random.rand()), float(torch.rand(1)), own[0].random(), float(own[1].random()),
            float(torch.rand(1, generator=own[2])), float(own[3].rand()),
        ]  # fmt: skip

    state.commit()
    drawn = draw()
    for _ in range(2):
        state.restore()
        assert draw() == drawn
    state.commit()
    assert draw() != drawn
    with pytest.raises(TypeError, match=r"RandomStates\(list\): it takes random\.Random"):
        RandomStates([1])
