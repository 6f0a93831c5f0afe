"""Whoever is on the way between ranks may change what they send: a pickle of theirs is never run, nor an old one again."""

from __future__ import annotations

import itertools
import os
import pickle
from typing import Any

import numpy as np
import pytest
from world import ranks

import horoclone as hvd
from horoclone import arrays, objects
from horoclone.bootstrap import seal


class Evil:
    def __reduce__(self) -> Any:
        return os.putenv, ("HC_TEST_EVIL", "1")


def between(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """What this rank receives goes through change(bytes, call) first."""
    for name in ("broadcast", "allgather"):
        real = getattr(arrays, name)

        def changed(array: Any, *rest: Any, real: Any = real, name: str = name) -> Any:
            got = real(array, *rest)
            return change(got, name) if got.dtype == np.uint8 else got

        monkeypatch.setattr(objects.arrays, name, changed)


def with_evil(data: Any, name: str) -> Any:
    evil = np.frombuffer(pickle.dumps(Evil()), np.uint8)
    changed = data.copy()
    changed[: len(evil)] = evil
    return changed


@ranks(2)
def test_a_pickle_of_somebody_else_is_not_run():
    text, patch = "x" * 200, pytest.MonkeyPatch()
    for call, name in itertools.product(
        (lambda name: hvd.broadcast_object(text, 0, name), lambda name: hvd.allgather_object(text, name)),
        (None, "x"),
    ):
        if hvd.rank() == 1:
            between(patch, with_evil)
            loads, ran = pickle.loads, []
            with pytest.raises(
                hvd.HorovodInternalError,
                match=r"rank 0 has sent was changed on its way.*SECURITY.md.*threads.* name=",
            ):
                call(name)
            patch.undo()
            assert pickle.loads is loads and not ran
        else:
            call(name)
        assert call(name) in (text, [text, text]), "and the runtime goes on"


@ranks(2)
def test_one_bit_anywhere_and_an_old_message_are_found():
    patch = pytest.MonkeyPatch()
    kept: list[Any] = []
    for place in (0, 3, -1, -8, -16, -17, "keep", "again"):

        def change(data: Any, name: str, place: Any = place) -> Any:
            if place == "keep":
                kept.append(data.copy())
            if place in ("keep", "again"):
                return data if place == "keep" else kept[0]
            data = data.copy()
            data[place] ^= 1
            return data

        if hvd.rank() == 1:
            between(patch, change)
        try:
            found = hvd.broadcast_object({"step": 1}, 0, "x")
        except hvd.HorovodInternalError as error:
            assert hvd.rank() == 1 and place != "keep" and "changed on its way" in str(error)
        else:
            assert hvd.rank() == 0 or place == "keep", place
            assert found == {"step": 1}
        patch.undo()


@ranks(3)
def test_what_two_ranks_have_sent_cannot_be_exchanged():
    patch = pytest.MonkeyPatch()

    def exchanged(data: Any, name: str) -> Any:
        half = len(data) // 3
        return np.concatenate([data[half : 2 * half], data[:half], data[2 * half :]])

    if hvd.rank() == 2:
        between(patch, exchanged)
        with pytest.raises(
            hvd.HorovodInternalError, match="allgather_object: what rank 0 has sent was changed"
        ):
            hvd.allgather_object(hvd.rank())
        patch.undo()
    else:
        hvd.allgather_object(hvd.rank())
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_process_sets_and_other_roots():
    some = hvd.add_process_set([2, 0])
    if some.included():
        assert hvd.broadcast_object("two" if hvd.rank() == 2 else None, 2, process_set=some) == "two"
        assert hvd.allgather_object(hvd.rank(), process_set=some) == [0, 2]
    for root in range(3):
        assert hvd.broadcast_object(hvd.rank(), root) == root
    hvd.remove_process_set(some)


@ranks(2)
def test_packs_are_opened_with_the_words_that_they_were_sealed_for():
    data = objects.sealed(objects.packed({"a": np.arange(5)}), "shard 1")
    assert (objects.unpacked(objects.opened(data.copy(), "shard 1"))["a"] == np.arange(5)).all()
    changed = data.copy()
    changed[70] ^= 1
    for wrong, context in (
        (data, "shard 2"),
        (changed, "shard 1"),
        (data[:-64], "shard 1"),
        (data[:10], "shard 1"),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="was changed on its way"):
            objects.opened(wrong, context)


def test_a_digest_is_of_the_secret_the_words_and_every_boundary() -> None:
    made = {
        seal.tag_of(secret, context, parts)
        for secret in (b"a", b"b")
        for context in ("x", "y")
        for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""])
    }
    assert len(made) == 16 and all(len(tag) == seal.TAG_BYTES for tag in made)
    assert seal.is_right(seal.tag_of(b"a", "x", [np.arange(3)]), b"a", "x", [np.arange(3).tobytes()])
