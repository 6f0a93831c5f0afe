"""A manifest whose digest is right and whose content is hostile: load() says CheckpointError, and makes nothing of it."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horoclone.checkpoint import CheckpointError, Owned, files, load
from horoclone.checkpoint.content import Piece, not_tiled
from horoclone.checkpoint.saving import save_alone


def saved(path: Path) -> Path:
    return save_alone(path, {"w": np.arange(1000.0), "n": 1, "o": Owned(np.arange(5))}, 3)


def rewrite(place: Path, change: Callable[[Any], Any]) -> None:
    manifest = place / files.MANIFEST
    whole = json.loads(manifest.read_text())
    changed = change(whole["content"])
    content = whole["content"] if changed is None else changed
    manifest.write_text(json.dumps({**whole, "content": content, "sha256": files._digest_of(content)}))


def pieces(shape: list[int], *given: list[Any]) -> Callable[[Any], Any]:
    def change(content: Any) -> None:
        content["arrays"][0][3] = shape
        content["pieces"] = {"0": [["w", *one, 0] for one in given]}

    return change


def node(value: Any) -> Callable[[Any], Any]:
    return lambda content: {**content, "node": value}


def without(part: str) -> Callable[[Any], Any]:
    return lambda content: {key: value for key, value in content.items() if key != part}


def deep(count: int) -> Any:
    made: Any = 1
    for _ in range(count):
        made = {"list": [made]}
    return made


CASES: dict[str, Callable[[Any], Any]] = {
    "half": pieces([2000], [[0], [1000]]), "a gap": pieces([2000], [[0], [1000]], [[1001], [999]]),
    "twice": pieces([2000], [[0], [1000]], [[0], [1000]]), "overlap": pieces([2000], [[0], [1000]], [[900], [1000]]),
    "beyond": pieces([1200], [[500], [1000]]), "before": pieces([2000], [[-500], [1000]], [[1000], [1000]]),
    "huge": pieces([1 << 40], [[0], [1000]]), "huge twice": pieces([1 << 40, 1 << 40], [[0, 0], [1000, 1]]),
    "other dimensions": pieces([10, 100], [[0], [1000]]), "none": pieces([1000]), "floats": pieces([1000], [[0.0], [1000]]),
    "of no array": lambda c: {**c, "pieces": {"7": []}}, "bool": pieces([1000], [[False], [1000]]),
    "a path": lambda c: {**c, "files": [["/etc/passwd", 1, "crc32:00000000"]]},
    "a path upwards": lambda c: {**c, "files": [["../x", 1, "crc32:00000000"]]},
    "a path below": lambda c: {**c, "files": [["a/x", 1, "crc32:00000000"]]},
    "a NUL": lambda c: {**c, "files": [["a\0b", 1, "crc32:00000000"]]},
    "no length": lambda c: {**c, "files": [["a", None, "crc32:00000000"]]},
    "no files": lambda c: {**c, "files": None}, "no file": lambda c: {**c, "files": []}, "null": lambda c: 0,
    "a list": lambda c: [c],
    **{f"without {part}": without(part) for part in ("node", "arrays", "files", "owned", "number")},
    "a number of text": lambda c: {**c, "number": "1"},
    "a key that is a list": node({"dict": [[[1], 2]]}), "two keys": node({"dict": [["a", 1], ["a", 2]]}),
    "a key that is null": node({"dict": [[None, 2]]}), "two words": node({"dict": [], "list": []}), "no word": node({}),
    "an unknown word": node({"call": "os.system"}), "a float of text": node({"float": "0"}),
    "a float of a list": node({"float": [1]}), "no such array": node({"array": 7}), "array -1": node({"array": -1}),
    "array x": node({"array": "x"}), "array true": node({"array": False}), "no such owned": node({"owned": -1}),
    "a dict of no pairs": node({"dict": [1]}), "a list that is none": node({"list": "ab"}), "deep": node(deep(300)),
    "a bare list": node([1]), "dtype": lambda c: c["arrays"][0].__setitem__(2, "O"),
    "another dtype": lambda c: c["arrays"][0].__setitem__(2, "F32"), "a shape": lambda c: c["arrays"][0].__setitem__(3, 5),
    "a negative shape": lambda c: c["arrays"][0].__setitem__(3, [-1, -1000]),
    "another name": lambda c: c["arrays"][0].__setitem__(0, "v"), "no such file": lambda c: c["arrays"][0].__setitem__(4, 1),
    "file -1": lambda c: c["arrays"][0].__setitem__(4, -1), "a short row": lambda c: c["arrays"][0].pop(),
    "owned of owned": lambda c: c["owned"][0].update(node={"list": [{"owned": 0}]}),
    "owned that is none": lambda c: c["owned"].__setitem__(0, 5), "owned elsewhere": lambda c: c["owned"][0].update(
        file=["../x", 1, "crc32:00000000"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_content_is_refused(tmp_path: Path, name: str) -> None:
    place = saved(tmp_path)
    rewrite(place, CASES[name])
    with pytest.raises(CheckpointError):
        found = load(tmp_path)
        found["o"][0]


def test_what_is_no_file_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    place = saved(tmp_path)
    for name, text in (
        (files.MANIFEST, "it is not a regular file"),
        ("rank-00000.safetensors", "it is not a regular file"),
    ):
        kept = (place / name).rename(tmp_path / "kept")
        os.mkfifo(place / name)
        with pytest.raises(CheckpointError, match=text):
            load(tmp_path)
        (place / name).unlink()
        kept.rename(place / name)
    with open(place / files.MANIFEST, "r+b") as file:
        file.truncate(50 << 30)
    with pytest.raises(CheckpointError, match=f"it has {50 << 30} bytes"):
        load(tmp_path)
    (place / files.MANIFEST).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="it is not valid JSON"):
        load(tmp_path)


def test_two_names_of_one_number_are_one_save(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "save-000000001").mkdir()
    assert files.saves(tmp_path) == [1]


def test_a_save_whose_pieces_are_not_the_array_is_not_made(tmp_path: Path) -> None:
    content = {
        "node": {"array": 0}, "arrays": [["w", "torch", "F32", [4], -1]], "files": [["f", 1, "crc32:0"]], "owned": [],
        "number": 1, "pieces": {"0": [["w@0", [0], [2], 0]]},
    }  # fmt: skip
    with pytest.raises(
        CheckpointError,
        match="cannot be completed: the pieces of the array 'w' have 2 elements, and it has 4",
    ):
        files.write_manifest(tmp_path, content)
    assert os.listdir(tmp_path) == []


def test_pieces_are_told_from_what_is_not_the_array() -> None:
    """Against counting every element, for random boxes."""
    chance = random.Random(5)
    seen = set()
    for _ in range(3000):
        shape = tuple(chance.randrange(4) for _ in range(chance.randrange(3)))
        cuts = [sorted({0, length, *(chance.randrange(length + 1) for _ in range(2))}) for length in shape]
        boxes = itertools.product(*[list(itertools.pairwise(some)) for some in cuts])
        given = [Piece("w", tuple(a for a, _ in box), tuple(b - a for a, b in box), 0) for box in boxes]
        if given and chance.random() < 0.6:
            one = given.pop(chance.randrange(len(given)))
            if shape and chance.random() < 0.7:
                moved = tuple(max(0, at + chance.choice((-1, 0, 1))) for at in one.offsets)
                given.append(one._replace(offsets=moved))
        count = np.zeros(tuple(length + 5 for length in shape), int)
        for piece in given:
            count[tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.shape, strict=True))] += 1
        inside = tuple(slice(0, length) for length in shape)
        outside = count.sum() - count[inside].sum()
        is_tiled = bool((count[inside] == 1).all()) and outside == 0
        assert (not_tiled(shape, given) == "") == is_tiled, (shape, given, not_tiled(shape, given))
        seen.add(is_tiled)
    assert seen == {True, False}
