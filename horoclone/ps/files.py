"""Saves of a table: each server writes the partitions that it holds, as safetensors files of bounded size; the manifest
comes last, so that a save without one is none.

PATH/TABLE.json                          the manifest
PATH/TABLE-SAVE-p00001-00000.safetensors    ids (int64), weights and state (float32) of some rows

PATH is a directory that every server and worker sees, or a URL that fsspec knows ("s3://bucket/folder").
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from horoclone import errors
from horoclone.runtime import native_module

FORMAT, VERSION = "horoclone parameter server", 1
FILE_BYTES = 256 << 20  # of rows in one file; a server holds one such file in memory while it writes
CHUNK_BYTES = 4 << 20  # of rows read under the partition's lock


def write(native: Any, path: str, spec: dict[str, Any], partition: int, number: str) -> dict[str, Any]:
    """Writes a partition's rows of a table on its server. HorovodInternalError says what the disk said."""
    dim, state = spec["dim"], native_module.core().table_state(spec)
    chunk = max(1, CHUNK_BYTES // (4 * (dim + state) + 8))
    chunks = max(1, FILE_BYTES // CHUNK_BYTES)
    names: list[str] = []
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
            return {"files": names, "rows": start, "steps": steps}
        name = f"{spec['name'].replace('/', '_')}-{number}-p{partition:05}-{len(names):05}.safetensors"
        rows = np.concatenate([rows for _, rows in parts])
        arrays = {
            "ids": np.concatenate([ids for ids, _ in parts]),
            "weights": np.ascontiguousarray(rows[:, :dim]),
            "state": np.ascontiguousarray(rows[:, dim:]),
        }
        _put(path, name, save(arrays))
        names.append(name)


def write_manifest(path: str, manifest: dict[str, Any]) -> None:
    """Makes the save complete."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1)
    _put(path, _manifest_name(manifest["spec"]["name"]), text.encode())


def read_manifest(path: str, table: str) -> dict[str, Any]:
    """HorovodInternalError where there is none, or it is not one."""
    manifest = json.loads(_get(path, _manifest_name(table)))
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise errors.HorovodInternalError(f"{path}: {_manifest_name(table)} is no save of a table")
    return dict(manifest)


def read_rows(
    path: str, manifest: dict[str, Any]
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(ids, rows with their state) file by file."""
    for name in manifest["files"]:
        arrays = load(_get(path, name))
        yield (
            arrays["ids"],
            np.ascontiguousarray(np.concatenate([arrays["weights"], arrays["state"]], axis=1)),
        )


def _manifest_name(table: str) -> str:
    return f"{table.replace('/', '_')}.json"


def _put(path: str, name: str, content: bytes) -> None:
    if "://" in path:
        with _fsspec(path).open(f"{path.rstrip('/')}/{name}", "wb") as file:
            file.write(content)
        return
    try:
        os.makedirs(path, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".incomplete-", dir=path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, os.path.join(path, name))
        except BaseException:
            os.unlink(temporary)
            raise
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


def _fsspec(path: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            f"{path}: a URL needs the package fsspec (and s3fs, gcsfs ...): pip install fsspec"
        ) from error
    return fsspec.filesystem(path.split("://", 1)[0])
