"""What the content of a manifest must be, before anything is made of it.

A digest that fits shows that nothing has changed since the manifest was written, not that it makes sense: whoever can
write the file can write the digest. What load() does with a content that was checked cannot go astray. Pure.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from horoclone.checkpoint.leaves import ITEM_BYTES
from horoclone.checkpoint.tree import DEPTH, PAIRS, SEQUENCES

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # of a save: in its directory and nowhere else


class Piece(NamedTuple):
    """A part of an array, or all of it: where it lies in the array, and under which name in which file."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: int


class Wrong(ValueError):
    """What is wrong with a content."""


def check(content: Any) -> None:
    """That every part of a content is there, of the right kind, and fits the others."""
    _must(isinstance(content, dict), "it is not a table")
    for part in ("node", "arrays", "files", "owned", "number"):
        _must(part in content, f"it has no {part!r}")
    _must(_is_count(content["number"]), "its number is none")
    for part in ("arrays", "files", "owned"):
        _must(isinstance(content[part], list), f"{part!r} is not a list")
    for one in content["files"]:
        _check_file(one)
    rows, files = content["arrays"], len(content["files"])
    pieces = content.get("pieces", {})
    _must(isinstance(pieces, dict), "'pieces' is not a table")
    _must(all(key in {str(place) for place in range(len(rows))} for key in pieces), "pieces of no array")
    for place, row in enumerate(rows):
        _check_row(row, 5)
        in_pieces = str(place) in pieces
        _must(in_pieces or _is_place(row[4], files), f"the array {row[0]!r} is in no file")
        if in_pieces:
            _check_pieces(row, pieces[str(place)], files)
    _check_node(content["node"], len(rows), None, 0)
    for own in content["owned"]:
        if own is not None:
            _must(isinstance(own, dict) and {"node", "arrays", "file"} <= set(own), "an Owned is not whole")
            _check_file(own["file"])
            _must(isinstance(own["arrays"], list), "the arrays of an Owned are no list")
            for row in own["arrays"]:
                _check_row(row, 4)
            node = own["node"]
            _must(isinstance(node, dict) and isinstance(node.get("list"), list), "an Owned is not a list")
            _check_node(node, len(own["arrays"]), 0, 0)


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_place(value: Any, count: int) -> bool:
    return _is_count(value) and value < count


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(map(_is_count, value))


def _check_file(one: Any) -> None:
    _must(isinstance(one, list) and len(one) == 3, "a file is not described by three values")
    name, nbytes, digest = one
    _must(isinstance(name, str) and bool(_FILE.fullmatch(name)), f"{name!r} is not a file of a save")
    _must(_is_count(nbytes) and isinstance(digest, str), f"the file {name} has no length and digest")


def _check_row(row: Any, count: int) -> None:
    _must(isinstance(row, list) and len(row) == count, f"an array is not described by {count} values")
    _must(isinstance(row[0], str) and isinstance(row[1], str), "an array has no name and kind")
    _must(isinstance(row[2], str) and row[2] in ITEM_BYTES, f"the array {row[0]!r} has the dtype {row[2]!r}")
    _must(_is_shape(row[3]), f"the array {row[0]!r} has the shape {row[3]!r}")


def _check_pieces(row: list[Any], given: Any, files: int) -> None:
    name, shape = row[0], row[3]
    _must(isinstance(given, list), f"the pieces of the array {name!r} are no list")
    pieces = []
    for one in given:
        _must(
            isinstance(one, list) and len(one) == 4,
            f"a piece of the array {name!r} is not described by 4 values",
        )
        _must(
            isinstance(one[0], str) and _is_place(one[3], files),
            f"a piece of the array {name!r} is in no file",
        )
        _must(_is_shape(one[1]) and _is_shape(one[2]), f"a piece of the array {name!r} lies nowhere")
        pieces.append(Piece(one[0], tuple(one[1]), tuple(one[2]), one[3]))
    if problem := not_tiled(tuple(shape), pieces):
        raise Wrong(f"the pieces of the array {name!r} {problem}")


def not_tiled(shape: tuple[int, ...], pieces: list[Piece]) -> str:
    """Why the pieces are not the array, each element once; '' where they are."""
    filled = 0
    for piece in pieces:
        if not len(piece.offsets) == len(piece.shape) == len(shape):
            return f"have another number of dimensions than {list(shape)}"
        if any(
            at + length > whole for at, length, whole in zip(piece.offsets, piece.shape, shape, strict=True)
        ):
            return f"reach beyond its shape {list(shape)}"
        filled += _elements(piece.shape)
    some = sorted((piece for piece in pieces if _elements(piece.shape)), key=lambda piece: piece.offsets)
    for place, piece in enumerate(some):
        for other in some[place + 1 :]:
            if shape and other.offsets[0] >= piece.offsets[0] + piece.shape[0]:
                break
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(piece.offsets, piece.shape, other.offsets, other.shape, strict=True)
            ):
                return f"overlap at {list(other.offsets)}"
    return "" if filled == _elements(shape) else f"have {filled} elements, and it has {_elements(shape)}"


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _check_node(node: Any, arrays: int, owned: int | None, depth: int) -> None:
    """owned: how many values are Owned; None: as many as there are pieces of."""
    _must(depth <= DEPTH + 2, "its state is too deep")
    if not isinstance(node, dict):
        _must(node is None or type(node) in (bool, int, float, str), f"{node!r} is not a value")
        return
    _must(len(node) == 1, "a value of its state has not one kind")
    ((word, value),) = node.items()
    if word == "array":
        _must(_is_place(value, arrays), f"there is no array {value!r}")
    elif word == "owned":
        _must(_is_count(value) and owned != 0, f"there is no Owned {value!r}")
    elif word == "float":
        _must(value in ("nan", "inf", "-inf"), f"{value!r} is not a number")
    elif word in SEQUENCES:
        _must(isinstance(value, list), f"a {word} of its state is none")
        for one in value:
            _check_node(one, arrays, owned, depth + 1)
    else:
        _must(
            word in PAIRS and isinstance(value, list),
            f"its state has a {word!r}, which this version does not know",
        )
        keys = set()
        for one in value:
            _must(isinstance(one, list) and len(one) == 2, f"an entry of a {word} is not a pair")
            _must(type(one[0]) in (str, int) and one[0] not in keys, f"a {word} has the key {one[0]!r}")
            keys.add(one[0])
            _check_node(one[1], arrays, owned, depth + 1)
