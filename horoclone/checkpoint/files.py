"""The files of a save: written in a directory of their own, made durable, and published by one rename.

PATH/.incomplete-00000007-ab12cd34   while the ranks write
PATH/save-00000007                   complete: it has its manifest, and all files were on disk before it got this name
PATH/.removed-00000006-ab12cd34      being removed
PATH/.owner                          which job saves there (owner.py)

The files of arrays are those of safetensors, whose library reads every header, also of what was just written
(docs/decisions/checkpoints.md).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from horoclone.anonymous_file import anonymous_file
from horoclone.checkpoint import content as contents
from horoclone.checkpoint import owner
from horoclone.checkpoint.failures import CheckpointError
from horoclone.checkpoint.image import PAGE
from horoclone.checkpoint.leaves import Bytes, Form

FORMAT, VERSION = "horoclone checkpoint", 2  # version 1 had the sha256 of a file in place of its CRC-32
_READ_VERSIONS = (1, 2)
MANIFEST = "manifest.json"
# after which an incomplete directory is removed where nobody can tell whether its job lives
STALE_S = 24 * 3600.0
MANIFEST_BYTES = 1 << 30  # at most; the manifest of a million arrays has a tenth of that
_CHUNK = 8 << 20  # bytes that are read at once
# bytes that are written at once: between two the thread takes the GIL, for which training waits
_PIECE = 64 << 20
_COMPLETE = re.compile(r"save-(\d{8,})")
_LEFT = re.compile(r"\.(?:incomplete|removed)-(\d{8,})-[0-9a-f]+")
_under_way: set[str] = set()  # directories in which this process writes: their names, which are random


class Written(NamedTuple):
    """A file as the manifest has it. digest: "crc32:" and 8 hexadecimal digits; in version 1 those of a sha256."""

    name: str
    nbytes: int
    digest: str


# --- directories ---


def saves(path: str | os.PathLike[str]) -> list[int]:
    """Returns the numbers of the complete saves in a directory, ascending; [] where there is none, or no directory."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    found = [int(match[1]) for name in names if (match := _COMPLETE.fullmatch(name))]
    return sorted(number for number in set(found) if (place_of(path, number) / MANIFEST).exists())


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
    """Makes a directory for the next save; its number, and the name of the directory, which end() is told later.

    It also removes what saves that died have left. CheckpointError where another job that lives saves there."""
    _make_directory(path)
    is_ours_alone = owner.claim(path)
    names = os.listdir(path)
    for name in names:
        if (
            _LEFT.fullmatch(name)
            and name not in _under_way
            and (is_ours_alone or _age_s(path / name) > STALE_S)
        ):
            remove(path / name)
    numbers = [int(m[1]) for name in names if (m := _COMPLETE.fullmatch(name))]
    number = max(numbers, default=0) + 1
    name = f".incomplete-{number:08d}-{secrets.token_hex(4)}"
    _under_way.add(name)
    os.mkdir(path / name)
    return number, name


def end(name: str) -> None:
    """This process writes no more in a directory that begin() has made, whatever has become of it."""
    _under_way.discard(name)


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
            f"{place} was created in the meantime: two jobs save to {path}. Give each a directory of its own."
        ) from error
    _sync_directory(path)
    return place


def tidy(path: Path, keep: int) -> None:
    """Leaves the `keep` newest saves."""
    for number in saves(path)[:-keep]:
        gone = path / f".removed-{number:08d}-{secrets.token_hex(4)}"
        os.rename(place_of(path, number), gone)  # from here on nobody takes what is left of it for a save
        remove(gone)


def remove(place: Path) -> None:
    """As far as it can be; what stays is looked at again by begin()."""
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


def write_arrays(place: Path, image: Bytes) -> Written:
    """Writes a new file out of memory that begins at a page; when it returns, the file and its name are on disk."""
    _check_header(image)
    crc = 0
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _use_the_cache(file, False)
        for piece in _pieces(image.data):
            if len(piece) % PAGE:
                _use_the_cache(file, True)
            crc = zlib.crc32(piece, crc)  # of what was to be written, not of what a disk has made of it
            _write_all(file, piece)
        os.fsync(file)
    finally:
        os.close(file)
    _sync_directory(place.parent)
    return Written(place.name, image.nbytes, f"crc32:{crc:08x}")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    """Pieces of whole pages, and what is left."""
    whole = len(data) - len(data) % PAGE
    for begin in range(0, whole, _PIECE):
        yield data[begin : min(begin + _PIECE, whole)]
    if whole < len(data):
        yield data[whole:]


def _write_all(file: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(file, data) :]
        except OSError as error:
            # EINVAL: not past the cache on this file system, or not from here, as half a page was written before.
            if error.errno != errno.EINVAL or not _use_the_cache(file, True):
                raise


def _use_the_cache(file: int, wanted: bool) -> bool:
    """Whether that has changed. Past the page cache the disk reads our memory itself, which costs no processor a copy;
    a file system that cannot do that says so here or at the first write."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    new = flags & ~os.O_DIRECT if wanted else flags | os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, new)
    except OSError:
        return False
    return new != flags


def _check_header(image: Bytes) -> None:
    """That the library of the format takes the file for one of its own. It reads a file in memory that has the header
    and the length, so the disk is not asked for what it was just given."""
    with open(anonymous_file("horoclone header"), "wb", buffering=0) as file:
        file.write(image.data[: 8 + int.from_bytes(image[:8].tobytes(), "little")])
        file.truncate(image.nbytes)
        with safe_open(f"/proc/self/fd/{file.fileno()}", framework="numpy", backend="pread"):
            pass


def _write_text(place: Path, text: bytes) -> None:
    """Writes a new file; when it returns, the file and its name are on disk."""
    with open(place, "xb", buffering=0) as file:
        rest = memoryview(text)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    _sync_directory(place.parent)


def write_manifest(place: Path, content: Any) -> None:
    """content: what JSON can say. Its digest lies beside it. CheckpointError for one that load() would not take."""
    try:
        contents.check(content)
    except contents.Wrong as error:
        raise CheckpointError(f"{place} cannot be completed: {error}") from None
    whole = {"format": FORMAT, "version": VERSION, "sha256": _digest_of(content), "content": content}
    _write_text(place / MANIFEST, json.dumps(whole, allow_nan=False).encode())


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading ---


def damaged(place: Path, what: str) -> CheckpointError:
    """For a file that is not as it was written, or was written by somebody else."""
    return CheckpointError(
        f"{place} is damaged: {what}. Load an earlier save with load(..., number=N); hvd.checkpoint.saves(path) has "
        f"the numbers. Remove {place.parent} so that it is not chosen again."
    )


def read_manifest(place: Path) -> Any:
    """The content of the manifest in the directory of a save, when it is of this format and version, and whole."""
    name = place / MANIFEST
    try:
        with open(_opened(name), "rb") as file:
            if os.fstat(file.fileno()).st_size > MANIFEST_BYTES:
                raise damaged(name, f"it has {os.fstat(file.fileno()).st_size} bytes")
            whole = json.loads(file.read())
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. Look at its permissions and its disk."
        ) from error
    except (ValueError, RecursionError) as error:
        raise damaged(name, f"it is not valid JSON ({error})") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{name} was not written by hvd.checkpoint.save. Load it with what wrote it.")
    if whole.get("version") not in _READ_VERSIONS:
        raise CheckpointError(
            f"{name} has version {whole.get('version')!r} of the format, and this horoclone reads versions 1 and 2. "
            "Load it with the version of horoclone that wrote it, or a later one."
        )
    try:
        if "content" not in whole or _digest_of(whole["content"]) != whole.get("sha256"):
            raise damaged(name, "its content does not have the digest that was written with it")
        contents.check(whole["content"])
    except (contents.Wrong, RecursionError) as error:
        raise damaged(name, str(error)) from None
    return whole["content"]


def _opened(name: Path) -> int:
    """A descriptor of a file, for `with open(it)`, and of nothing else: a pipe in its place would be waited for."""
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise damaged(name, "it is not a regular file")
    return file


def check_file(place: Path, written: Written) -> None:
    """Whether a file is there in its length."""
    name = place / written.name
    try:
        status = os.stat(name)
    except FileNotFoundError:
        raise CheckpointError(
            f"{name}, which the manifest names, is missing: the save cannot be loaded. Copy the file back, or load an "
            "earlier save with load(..., number=N); hvd.checkpoint.saves(path) has the numbers."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise damaged(name, "it is not a regular file")
    if status.st_size != written.nbytes:
        raise damaged(name, f"it has {status.st_size} bytes, and {written.nbytes} were written")


def read_arrays(place: Path, written: Written) -> dict[str, tuple[Form, Bytes]]:
    """The arrays of a file by name, once every byte of it is known to be as it was written."""
    check_file(place, written)
    name = place / written.name
    check = _Sha256() if ":" not in written.digest else _Crc32()
    try:
        with open(_opened(name), "rb", buffering=0) as file:
            header, forms = _header_of(name, file)
            check.update(header)
            arrays = {key: (form, _read(file, form.nbytes, check)) for key, form in forms.items()}
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}. Look at its permissions and its disk."
        ) from error
    except (ValueError, KeyError, SafetensorError) as error:
        raise damaged(name, str(error) or type(error).__name__) from None
    if check.text() != written.digest:
        raise damaged(name, "its bytes do not have the checksum that the manifest has")
    return arrays


class _Crc32:
    """The checksum of a file."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        """Goes on with these bytes."""
        self._value = zlib.crc32(data, self._value)

    def text(self) -> str:
        """As the manifest has it."""
        return f"crc32:{self._value:08x}"


class _Sha256:
    """The checksum of a file in version 1."""

    def __init__(self) -> None:
        self._value = hashlib.sha256()

    def update(self, data: Any) -> None:
        """Goes on with these bytes."""
        self._value.update(data)

    def text(self) -> str:
        """As the manifest has it."""
        return self._value.hexdigest()


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


def _read(file: Any, count: int, check: _Crc32 | _Sha256) -> Bytes:
    data = np.empty(count, np.uint8)
    view = data.data
    done = 0
    while done < count:
        got = file.readinto(view[done : done + _CHUNK])
        if not got:
            raise ValueError("it has become shorter")
        check.update(view[done : done + got])
        done += got
    return data
