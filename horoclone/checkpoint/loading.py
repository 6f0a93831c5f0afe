"""Reads a save on any number of ranks: each reads for itself, and no rank waits for another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from horoclone.checkpoint import files
from horoclone.checkpoint.content import Piece
from horoclone.checkpoint.failures import CheckpointError, NothingSaved
from horoclone.checkpoint.leaves import ITEM_BYTES, Bytes, Form, kind_named, kind_of
from horoclone.checkpoint.tree import built


class Pieces(Sequence[Any]):
    """Gives what each rank that saved had as Owned at one place: pieces[r] reads that of rank r when it is asked
    for."""

    def __init__(self, place: Path, owned: list[Any], number: int) -> None:
        self._place, self._owned, self._number = place, owned, number

    def __len__(self) -> int:
        return len(self._owned)

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        entry = self._owned[rank]
        arrays = files.read_arrays(self._place, files.Written(*entry["file"]))
        reader = _Reader(self._place, [[*row, 0] for row in entry["arrays"]], [arrays])
        return built({"list": [entry["node"]["list"][self._number]]}, reader.array, reader.owned)[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))


class _Reader:
    """Gives the arrays of a manifest. rows: name, kind, dtype, shape and file; pieces: of those that lie in several."""

    def __init__(
        self,
        place: Path,
        rows: list[Any],
        arrays: Sequence[dict[str, tuple[Form, Bytes]]],
        pieces: dict[str, list[Any]] | None = None,
    ) -> None:
        self._place, self._rows, self._arrays, self._all = place, rows, arrays, list[Any]()
        self._pieces = pieces or {}

    def owns(self, owned: list[Any]) -> None:
        self._all = owned

    def pieces(self, number: int) -> list[Piece]:
        name, _, _, shape, file = self._rows[number]
        if str(number) not in self._pieces:
            return [Piece(name, (0,) * len(shape), tuple(shape), file)]
        return [Piece(n, tuple(o), tuple(s), f) for n, o, s, f in self._pieces[str(number)]]

    def _data(self, number: int) -> tuple[Form, Bytes]:
        name, _, dtype, shape, _ = self._rows[number]
        form, found = Form(dtype, tuple(shape)), []
        for piece in self.pieces(number):
            its_form, data = self._arrays[piece.file].get(piece.name, (None, None))
            if data is None or its_form != Form(dtype, piece.shape):
                raise files.damaged(self._place, f"the array {name} is not as the manifest says")
            found.append((piece, data))
        if len(found) == 1 and found[0][0].shape == form.shape:
            return form, found[0][1]
        return form, _assembled(form, found)

    def array(self, number: int, like: Any) -> Any:
        form, data = self._data(number)
        if like is None:
            return kind_named(self._rows[number][1]).made(form, data, None)
        where, template = like
        wanted = kind_of(template)
        assert wanted is not None
        if wanted.form(template) != form:
            raise ValueError(
                f"{where} is {_words(form)} in the save and {_words(wanted.form(template))} in `like`"
            )
        return wanted.made(form, data, template)

    def owned(self, number: int) -> Pieces:
        return Pieces(self._place, self._all, number)


def _assembled(form: Form, found: list[tuple[Piece, Bytes]]) -> Bytes:
    """The elements of an array out of its pieces."""
    item = np.dtype(f"V{ITEM_BYTES[form.dtype]}")
    whole = np.empty(form.shape, item)  # the pieces are all of it, see content.not_tiled
    for piece, data in found:
        place = tuple(slice(at, at + length) for at, length in zip(piece.offsets, piece.shape, strict=True))
        whole[place] = data.view(item).reshape(piece.shape)
    return whole.reshape(-1).view(np.uint8)


def _words(form: Form) -> str:
    return f"{form.dtype}{list(form.shape)}"


def load(path: str | os.PathLike[str], like: Any = None, *, number: int | None = None) -> Any:
    """Returns the state of the newest complete save in a directory, or of the one with that number.

    like: a state of the same structure. Its arrays say where the loaded ones go (a device, a sharding) and of which
    framework they are; its named tuples come back as such. Without it each array is of the framework that it came
    from, in the memory of the host, or NumPy's where that framework's binding is not imported. Each rank reads all that
    is replicated; no rank waits for another, so it may be called anywhere, also before init().

    NothingSaved where there is no such save. ValueError that names the first place in which the save and `like`
    differ: a save of another model. CheckpointError for a file that is missing or damaged, and for another version.
    """
    reading = Reading(path, number)
    reader = _Reader(
        reading.place,
        reading.content["arrays"],
        [reading.arrays(file) for file in range(reading.count)],
        reading.content.get("pieces"),
    )
    reader.owns(reading.content["owned"])
    try:
        return built(reading.content["node"], reader.array, reader.owned, like)
    except ValueError as error:
        raise ValueError(
            f"{reading.place} does not fit: {error}. Is it a save of another model or job?"
        ) from None


class Reading:
    """A save that is read part by part: its manifest is there, files are read when they are asked for."""

    def __init__(self, path: str | os.PathLike[str], number: int | None) -> None:
        numbers = files.saves(path)
        if not numbers or (number is not None and number not in numbers):
            what = "no complete save" if number is None else f"no complete save with the number {number}"
            raise NothingSaved(
                f"there is {what} in {os.fspath(path)} (there are {numbers or 'none'}). Look at the path; a new job "
                "begins without load()."
            )
        if number is None:
            files.check_newest(path, numbers[-1])
        self.place = files.place_of(path, numbers[-1] if number is None else number)
        self.content = files.read_manifest(self.place)
        if self.content.get("number") != int(self.place.name.removeprefix("save-")):
            raise CheckpointError(
                f"{self.place} has the manifest of another save (number {self.content.get('number')}): directories "
                "were renamed or mixed. Copy and move whole directories only."
            )
        self._written = [files.Written(*one) for one in self.content["files"]]
        self.count = len(self._written)
        for entry in self.content["owned"]:
            if entry is not None:
                files.check_file(self.place, files.Written(*entry["file"]))

    def arrays(self, file: int) -> dict[str, tuple[Form, Bytes]]:
        """Those of a file, compared with its checksum."""
        return files.read_arrays(self.place, self._written[file])

    def row(self, number: int) -> list[Any]:
        """Of an array: its name, kind, dtype, shape and file."""
        row: list[Any] = self.content["arrays"][number]
        return row

    def pieces(self, number: int) -> list[Piece]:
        """Of an array."""
        return _Reader(self.place, self.content["arrays"], [], self.content.get("pieces")).pieces(number)

    def array(self, number: int) -> Any:
        """One array, of the framework that it came from."""
        needed = {piece.file: self.arrays(piece.file) for piece in self.pieces(number)}
        found = [needed.get(file, {}) for file in range(self.count)]
        return _Reader(self.place, self.content["arrays"], found, self.content.get("pieces")).array(
            number, None
        )

    def built(self, array: Callable[[int, Any], Any], owned: Callable[[int], Any]) -> Any:
        """The state, with what array(number, None) and owned(number) give in their places."""
        return built(self.content["node"], array, owned)
