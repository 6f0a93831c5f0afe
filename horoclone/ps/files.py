"""Saves of a table: each server writes the partitions that it holds, as safetensors files of bounded size; the manifest
comes last, with length and CRC-32 of each file and its own sha256, so that a save without one is none.

PATH/TABLE.json                          the manifest (TABLE: see stem_of)
PATH/TABLE.SAVE-p00001-00000.safetensors    ids (int64), weights and state (float32) of some rows
PATH: a directory that every server and worker sees, or a URL that fsspec knows ("s3://bucket/folder")."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from horoclone import errors
from horoclone.runtime import native_module

FORMAT, VERSION = "horoclone parameter server", 2
FILE_BYTES = 256 << 20  # of rows in one file; a server holds one such file in memory while it writes
CHUNK_BYTES = 4 << 20  # of rows read under the partition's lock
STEM = 120  # characters of a file's name that are the table's; most file systems allow 255 in all


def write(native: Any, path: str, spec: dict[str, Any], partition: int, number: str) -> dict[str, Any]:
    """Writes a partition's rows of a table on its server. HorovodInternalError says what the disk said."""
    dim, state = spec["dim"], native_module.core().table_state(spec)
    chunk = max(1, CHUNK_BYTES // (4 * (dim + state) + 8))
    chunks = max(1, FILE_BYTES // CHUNK_BYTES)
    written: list[Any] = []
    start = steps = 0
    while True:
        parts: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        while len(parts) < chunks:
            ids, rows = np.empty(chunk, np.int64), np.empty((chunk, dim + state), np.float32)
            count, done = native.rows(
                partition, spec["name"], start, chunk, ids.ctypes.data, rows.ctypes.data
            )
            if count == 0:
                break
            steps = done
            parts.append((ids[:count], rows[:count]))
            start += count
        if not parts:
            return {"files": written, "rows": start, "steps": steps}
        name = f"{stem_of(spec['name'])}.{number}-p{partition:05}-{len(written):05}.safetensors"
        rows = np.concatenate([rows for _, rows in parts])
        arrays = {
            "ids": np.concatenate([ids for ids, _ in parts]),
            "weights": np.ascontiguousarray(rows[:, :dim]),
            "state": np.ascontiguousarray(rows[:, dim:]),
        }
        content = save(arrays)
        _put(path, name, content)
        written.append([name, len(content), _crc_of(content)])


def write_manifest(path: str, content: dict[str, Any]) -> None:
    """Makes the save complete, and removes what earlier saves of the table have left, those that died among them."""
    whole = {"format": FORMAT, "version": VERSION, "sha256": _digest_of(content), "content": content}
    stem = stem_of(content["spec"]["name"])
    _put(path, f"{stem}.json", json.dumps(whole, indent=1).encode())
    named = {name for name, _, _ in content["files"]}
    with contextlib.suppress(OSError):  # what stays is looked at again by the next save
        for name in _listed(path):
            is_of_it = name.startswith((f"{stem}.", f".incomplete-{stem}."))
            if is_of_it and name not in named and name != f"{stem}.json":
                _remove(path, name)


def read_manifest(path: str, table: str) -> dict[str, Any]:
    """HorovodInternalError where there is none, it is not one of this table, or it is not as it was written."""
    name = f"{stem_of(table)}.json"
    try:
        whole = json.loads(_get(path, name))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, name, f"it is not valid JSON ({error})") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise errors.HorovodInternalError(f"{path}: {name} is not a save of a table")
    if whole.get("version") != VERSION:
        raise errors.HorovodInternalError(
            f"{path}: {name} has version {whole.get('version')!r} of the format, and this horoclone reads {VERSION}. "
            "Load it with the version of horoclone that wrote it"
        )
    content = whole.get("content")
    if not isinstance(content, dict) or _digest_of(content) != whole.get("sha256"):
        raise _damaged(path, name, "its content does not have the digest that was written with it")
    if content["spec"]["name"] != table:
        raise errors.HorovodInternalError(f"{path}: {name} is of table {content['spec']['name']!r}")
    return content


def read_rows(
    path: str, manifest: dict[str, Any]
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(ids, rows with their state) file by file, once every byte of all files is known to be as it was written: a table
    takes a save whole or not at all."""
    for written in manifest["files"]:
        _checked(path, *written)
    for written in manifest["files"]:
        arrays = load(_checked(path, *written))
        yield (
            arrays["ids"],
            np.ascontiguousarray(np.concatenate([arrays["weights"], arrays["state"]], axis=1)),
        )


def stem_of(table: str) -> str:
    """What the names of a table's files begin with; no other table's do, also where a file system takes upper for lower
    case or composes letters. A long one ends with its digest."""
    plain = re.sub(rb"[^a-z0-9_-]", lambda found: b"%%%02x" % ord(found[0]), table.encode()).decode()
    if len(plain) <= STEM:
        return plain
    return f"{plain[: STEM - 66]}%%{hashlib.sha256(table.encode()).hexdigest()}"


def _crc_of(content: bytes) -> str:
    return f"crc32:{zlib.crc32(content):08x}"


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _checked(path: str, name: str, nbytes: int, digest: str) -> bytes:
    content = _get(path, name)
    if len(content) != nbytes:
        raise _damaged(path, name, f"it has {len(content)} bytes, and {nbytes} were written")
    if _crc_of(content) != digest:
        raise _damaged(path, name, "its bytes do not have the checksum that the manifest has")
    return content


def _damaged(path: str, name: str, what: str) -> errors.HorovodInternalError:
    return errors.HorovodInternalError(
        f"{os.path.join(path, name)} is damaged: {what}. No row of the table was changed; load another save"
    )


def _put(path: str, name: str, content: bytes) -> None:
    if "://" in path:
        with _fsspec(path).open(f"{path.rstrip('/')}/{name}", "wb") as file:
            file.write(content)
        return
    try:
        os.makedirs(path, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".incomplete-{name}-", dir=path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, os.path.join(path, name))
        except BaseException:
            os.unlink(temporary)
            raise
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # the name is on disk before the files that it replaces go
        finally:
            os.close(directory)
    except OSError as error:
        raise errors.HorovodInternalError(
            f"{os.path.join(path, name)} cannot be written: {error.strerror or error}. Nothing of an earlier save was "
            "changed; free space or choose another path, and save again"
        ) from error


def _get(path: str, name: str) -> bytes:
    if "://" in path:
        with _fsspec(path).open(f"{path.rstrip('/')}/{name}", "rb") as file:
            return bytes(file.read())
    try:
        with open(os.path.join(path, name), "rb") as file:
            return file.read()
    except OSError as error:
        raise errors.HorovodInternalError(
            f"{os.path.join(path, name)} cannot be read: {error.strerror}. Is it the path that save() was given?"
        ) from error


def _listed(path: str) -> list[str]:
    if "://" in path:
        return [str(name).rsplit("/", 1)[-1] for name in _fsspec(path).ls(path, detail=False)]
    return os.listdir(path)


def _remove(path: str, name: str) -> None:
    if "://" in path:
        _fsspec(path).rm_file(f"{path.rstrip('/')}/{name}")
    else:
        os.unlink(os.path.join(path, name))


def _fsspec(path: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            f"{path}: a URL needs the package fsspec (and s3fs, gcsfs ...): pip install fsspec"
        ) from error
    return fsspec.filesystem(path.split("://", 1)[0])
