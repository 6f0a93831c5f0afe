"""The files of a save: written in a directory of their own, made durable, and published by one rename.

PATH/.incomplete-00000007-ab12cd34   while the ranks write
PATH/save-00000007                   complete: it has its manifest, and all files were on disk before it got this name
PATH/.removed-00000006-ab12cd34      being removed

The library safetensors writes the arrays' files and reads their headers (docs/decisions/0077).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from horoclone.checkpoint.failures import CheckpointError
from horoclone.checkpoint.leaves import Bytes, Form, numpy_name

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


def check_newest(path: str | os.PathLike[str], newest: int) -> None:
    """CheckpointError where a newer save than the newest complete one has lost its manifest."""
    for name in os.listdir(path):
        match = _COMPLETE.fullmatch(name)
        if match and int(match[1]) > newest and not (Path(path) / name / MANIFEST).exists():
            raise CheckpointError(
                f"{Path(path) / name / MANIFEST} is missing: a directory has this name only when it has its manifest. "
                f"Copy the file back, or remove {Path(path) / name}, or load an earlier save with load(..., number=N)."
            )


def place_of(path: str | os.PathLike[str], number: int) -> Path:
    """Where a complete save lies."""
    return Path(path) / f"save-{number:08d}"


def begin(path: Path) -> tuple[int, str]:
    """Makes a directory for the next save; its number, and the name of the directory."""
    _make_directory(path)
    numbers = [int(m[1]) for name in os.listdir(path) if (m := _COMPLETE.fullmatch(name))]
    number = max(numbers, default=0) + 1
    name = f".incomplete-{number:08d}-{secrets.token_hex(4)}"
    os.mkdir(path / name)
    return number, name


def _make_directory(path: Path) -> None:
    """With its parents; their names are on disk when it returns."""
    if not path.is_dir():
        _make_directory(path.parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise
        _sync_directory(path.parent)


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


def write_arrays(place: Path, arrays: Mapping[str, tuple[Form, Bytes]]) -> Written:
    """Writes a new file of forms and elements by name; when it returns, the file and its name are on disk."""
    specs = {
        name: TensorSpec(
            dtype=numpy_name(form.dtype), shape=form.shape, data_ptr=data.ctypes.data, data_len=data.nbytes
        )
        for name, (form, data) in arrays.items()
    }
    new = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    mode = os.fstat(new).st_mode & 0o777  # the library replaces the file by one that only its owner may read
    os.close(new)
    try:
        serialize_file(specs, place)
    except SafetensorError as error:
        raise _as_os_error(error) from None
    digest = hashlib.sha256()
    with open(place, "rb", buffering=0) as file:
        header, order = _header_of(place, file)
        digest.update(header)
        for name in order:  # of what was to be written, not of what a disk has made of it
            digest.update(arrays[name][1].data)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
        nbytes = os.fstat(file.fileno()).st_size
    _sync_directory(place.parent)
    return Written(place.name, nbytes, digest.hexdigest())


def _as_os_error(error: SafetensorError) -> Exception:
    """The library has the number of a failed system call in its text only."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error


def _write_text(place: Path, text: bytes) -> None:
    """Writes a new file; when it returns, the file and its name are on disk."""
    with open(place, "xb", buffering=0) as file:
        rest = memoryview(text)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    _sync_directory(place.parent)


def write_manifest(place: Path, content: Any) -> None:
    """content: what JSON can say. Its digest lies beside it."""
    whole = {"format": FORMAT, "version": VERSION, "sha256": _digest_of(content), "content": content}
    _write_text(place / MANIFEST, json.dumps(whole, allow_nan=False).encode())


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
            header, forms = _header_of(name, file)
            digest.update(header)
            arrays = {key: (form, _read(file, form.nbytes, digest)) for key, form in forms.items()}
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. Look at its permissions and its disk."
        ) from error
    except (ValueError, KeyError, SafetensorError) as error:
        raise damaged(name, str(error) or type(error).__name__) from None
    if digest.hexdigest() != written.sha256:
        raise damaged(name, "its bytes do not have the sha256 that the manifest has")
    return arrays


def _header_of(name: Path, file: Any) -> tuple[bytes, dict[str, Form]]:
    """Reads what lies before the elements; beside it the forms of the arrays, in the order of their elements.

    The library has checked that the elements fill the rest of the file. They are read here, as its reader for NumPy
    knows fewer dtypes than the format has, and computes no digest.
    """
    with safe_open(name, framework="numpy", backend="pread") as reader:
        slices = {key: reader.get_slice(key) for key in reader.offset_keys()}
        forms = {key: Form(one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()}
    before = os.fstat(file.fileno()).st_size - sum(form.nbytes for form in forms.values())
    return file.read(before), forms


def _read(file: Any, count: int, digest: Any) -> Bytes:
    data = np.empty(count, np.uint8)
    view = data.data
    done = 0
    while done < count:
        got = file.readinto(view[done : done + _CHUNK])
        if not got:
            raise ValueError("it has become shorter")
        digest.update(view[done : done + got])
        done += got
    return data
