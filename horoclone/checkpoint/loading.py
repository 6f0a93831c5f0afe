"""Reads a save, on any number of ranks: each reads for itself, and no rank waits for another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from horoclone.checkpoint import files
from horoclone.checkpoint.failures import CheckpointError, NothingSaved
from horoclone.checkpoint.leaves import Bytes, Form, kind_named, kind_of
from horoclone.checkpoint.tree import built


class Pieces(Sequence[Any]):
    """What the ranks that saved had as Owned at one place: pieces[r] reads that of rank r when it is asked for."""

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
    """Gives the arrays of a manifest."""

    def __init__(self, place: Path, rows: list[Any], arrays: list[dict[str, tuple[Form, Bytes]]]) -> None:
        self._place, self._rows, self._arrays, self._all = place, rows, arrays, list[Any]()

    def owns(self, owned: list[Any]) -> None:
        self._all = owned

    def array(self, number: int, like: Any) -> Any:
        name, kind, dtype, shape, file = self._rows[number]
        form, data = self._arrays[file][name]
        if form != Form(dtype, tuple(shape)):
            raise files.damaged(self._place, f"the array {name} is not as the manifest says")
        if like is None:
            return kind_named(kind).made(form, data, None)
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


def _words(form: Form) -> str:
    return f"{form.dtype}{list(form.shape)}"


def load(path: str | os.PathLike[str], like: Any = None, *, number: int | None = None) -> Any:
    """The state of the newest complete save in a directory, or of the one with that number.

    like: a state of the same structure. Its arrays say where the loaded ones go (a device, a sharding) and of which
    framework they are; its named tuples come back as such. Without it each array is of the framework that it came
    from, in the memory of the host, or NumPy's where that framework's binding is not imported. Each rank reads all that
    is replicated; no rank waits for another, so it may be called anywhere, also before init().

    NothingSaved where there is no such save. ValueError that names the first place in which the save and `like`
    differ: a save of another model. CheckpointError for a file that is missing or damaged, and for another version.
    """
    numbers = files.saves(path)
    if not numbers or (number is not None and number not in numbers):
        what = "no complete save" if number is None else f"no complete save with the number {number}"
        raise NothingSaved(
            f"there is {what} in {os.fspath(path)} (there are {numbers or 'none'}). Look at the path; a new job begins "
            "without load()."
        )
    place = files.place_of(path, numbers[-1] if number is None else number)
    content = files.read_manifest(place)
    if content.get("number") != int(place.name.removeprefix("save-")):
        raise CheckpointError(
            f"{place} has the manifest of another save (number {content.get('number')}): directories were renamed or "
            "mixed. Copy and move whole directories only."
        )
    written = [files.Written(*one) for one in content["files"]]
    for entry in content["owned"]:
        if entry is not None:
            files.check_file(place, files.Written(*entry["file"]))
    reader = _Reader(place, content["arrays"], [files.read_arrays(place, one) for one in written])
    reader.owns(content["owned"])
    try:
        return built(content["node"], reader.array, reader.owned, like)
    except ValueError as error:
        raise ValueError(f"{place} does not fit: {error}. Is it a save of another model or job?") from None
