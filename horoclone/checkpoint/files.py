"""The files of a save: written in a directory of their own, made durable, and shown by one rename.

PATH/.incomplete-00000007-ab12cd34   while the ranks write
PATH/save-00000007                   complete: it has its manifest, and everything was on disk before it got this name
PATH/.removed-00000006-ab12cd34      on its way out
The arrays lie in the format safetensors: 8 bytes with the length of a JSON header, the header, the elements.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horoclone.checkpoint.failures import CheckpointError
from horoclone.checkpoint.leaves import ITEM_BYTES, Bytes, Form

FORMAT, VERSION = "horoclone checkpoint", 1
MANIFEST = "manifest.json"
STALE_S = 24 * 3600.0  # an incomplete directory in which nothing was written for so long is removed
_CHUNK = 8 << 20
_COMPLETE = re.compile(r"save-(\d{8,})")
_LEFT = re.compile(r"\.(?:incomplete|removed)-(\d{8,})-[0-9a-f]+")


class Written(NamedTuple):
    """A file as the manifest has it."""

    name: str
    nbytes: int
    sha256: str


# --- directories ---


def saves(path: str | os.PathLike[str]) -> list[int]:
    """The numbers of the complete saves in a directory, ascending; [] where there is none, or no directory."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    found = [int(match[1]) for name in names if (match := _COMPLETE.fullmatch(name))]
    return sorted(number for number in found if (place_of(path, number) / MANIFEST).exists())


def place_of(path: str | os.PathLike[str], number: int) -> Path:
    """Where a complete save lies."""
    return Path(path) / f"save-{number:08d}"


def begin(path: Path) -> tuple[int, str]:
    """Makes a directory for the next save; its number, and the name of the directory."""
    os.makedirs(path, exist_ok=True)
    numbers = [int(m[1]) for name in os.listdir(path) if (m := _COMPLETE.fullmatch(name))]
    number = max(numbers, default=0) + 1
    name = f".incomplete-{number:08d}-{secrets.token_hex(4)}"
    os.mkdir(path / name)
    return number, name


def publish(path: Path, name: str, number: int) -> Path:
    """Gives a directory, whose files are on disk, its name as a complete save."""
    _sync_directory(path / name)
    place = place_of(path, number)
    try:
        os.rename(path / name, place)
    except OSError as error:
        if not place.exists():
            raise
        raise CheckpointError(
            f"{place} has come into being meanwhile: two jobs save to {path}. Give each a directory of its own."
        ) from error
    _sync_directory(path)
    return place


def tidy(path: Path, keep: int) -> None:
    """Leaves the `keep` newest saves, and removes what stale directories there are."""
    for number in saves(path)[:-keep]:
        gone = path / f".removed-{number:08d}-{secrets.token_hex(4)}"
        os.rename(place_of(path, number), gone)  # from here on nobody takes what is left of it for a save
        remove(gone)
    for name in os.listdir(path):
        if _LEFT.fullmatch(name) and _age_s(path / name) > STALE_S:
            remove(path / name)


def remove(place: Path) -> None:
    """As far as it can be; what stays is looked at again by tidy()."""
    shutil.rmtree(place, ignore_errors=True)


def _age_s(place: Path) -> float:
    try:
        newest = max(entry.stat().st_mtime for entry in (place, *place.iterdir()))
    except OSError:
        return 0.0
    return time.time() - newest


def _sync_directory(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- writing ---


def write_file(place: Path, parts: Sequence[bytes | Bytes]) -> Written:
    """Writes a new file; when it returns, the file and its name are on disk."""
    digest, nbytes = hashlib.sha256(), 0
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            whole = memoryview(part if isinstance(part, bytes) else part.data)
            for start in range(0, len(whole), _CHUNK):
                rest = whole[start : start + _CHUNK]
                digest.update(rest)
                nbytes += len(rest)
                while rest:
                    rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    _sync_directory(place.parent)
    return Written(place.name, nbytes, digest.hexdigest())


def write_arrays(place: Path, arrays: Sequence[tuple[str, Form, Bytes]]) -> Written:
    """arrays: names, forms and elements."""
    # Large items first: then every array begins at a multiple of its item's size.
    ordered = sorted(arrays, key=lambda array: -ITEM_BYTES[array[1].dtype])
    header: dict[str, Any] = {}
    end = 0
    for name, form, _ in ordered:
        header[name] = {"dtype": form.dtype, "shape": form.shape, "data_offsets": [end, end + form.nbytes]}
        end += form.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_file(place, [len(text).to_bytes(8, "little"), text, *(data for _, _, data in ordered)])


def write_manifest(place: Path, content: Any) -> None:
    """content: what JSON can say. Its digest lies beside it."""
    whole = {"format": FORMAT, "version": VERSION, "sha256": _digest_of(content), "content": content}
    write_file(place / MANIFEST, [json.dumps(whole, allow_nan=False).encode()])


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading ---


def damaged(place: Path, what: str) -> CheckpointError:
    """For a file that is not as it was written."""
    return CheckpointError(
        f"{place} is damaged: {what}. Load an earlier save with load(..., number=N); hvd.checkpoint.saves(path) has "
        f"the numbers. Remove {place.parent} so that it is not chosen again."
    )


def read_manifest(place: Path) -> Any:
    """The content of the manifest in the directory of a save, when it is of this format and version, and whole."""
    name = place / MANIFEST
    try:
        whole = json.loads(name.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. Look at its permissions and its disk."
        ) from error
    except ValueError as error:
        raise damaged(name, f"it is no JSON ({error})") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{name} was not written by hvd.checkpoint.save. Load it with what wrote it.")
    if whole.get("version") != VERSION:
        raise CheckpointError(
            f"{name} has version {whole.get('version')!r} of the format, and this horoclone reads version {VERSION}. "
            "Load it with the version of horoclone that wrote it, or a later one."
        )
    if "content" not in whole or _digest_of(whole["content"]) != whole.get("sha256"):
        raise damaged(name, "its content does not have the digest that was written with it")
    return whole["content"]


def check_file(place: Path, written: Written) -> None:
    """Whether a file is there in its length."""
    name = place / written.name
    try:
        nbytes = os.stat(name).st_size
    except FileNotFoundError:
        raise CheckpointError(
            f"{name}, which the manifest names, is missing: the save cannot be loaded. Copy the file back, or load an "
            "earlier save with load(..., number=N); hvd.checkpoint.saves(path) has the numbers."
        ) from None
    if nbytes != written.nbytes:
        raise damaged(name, f"it has {nbytes} bytes, and {written.nbytes} were written")


def read_arrays(place: Path, written: Written) -> dict[str, tuple[Form, Bytes]]:
    """The arrays of a file by name, once every byte of it is known to be as it was written."""
    check_file(place, written)
    name = place / written.name
    digest = hashlib.sha256()
    try:
        with open(name, "rb", buffering=0) as file:
            start = _read(file, 8, digest)
            length = int.from_bytes(start.tobytes(), "little")
            if length > written.nbytes - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(_read(file, length, digest).tobytes())
            arrays, end = {}, 0
            for key, entry in header.items():
                form = Form(entry["dtype"], tuple(entry["shape"]))
                if entry["data_offsets"] != [end, end + form.nbytes] or form.nbytes < 0:
                    raise ValueError(f"the place of {key} in it is wrong")
                end += form.nbytes
                if end > written.nbytes - 8 - length:
                    raise ValueError(f"{key} ends behind the end of the file")
                arrays[key] = (form, _read(file, form.nbytes, digest))
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. Look at its permissions and its disk."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(name, str(error) or type(error).__name__) from None
    if digest.hexdigest() != written.sha256 or 8 + length + end != written.nbytes:
        raise damaged(name, "its bytes do not have the sha256 that the manifest has")
    return arrays


def _read(file: Any, count: int, digest: Any) -> Bytes:
    data = np.empty(count, np.uint8)
    view = data.data
    done = 0
    while done < count:
        got = file.readinto(view[done : done + _CHUNK])
        if not got:
            raise ValueError("it is shorter than its header says")
        digest.update(view[done : done + got])
        done += got
    return data
