"""The files of this checkout as a commit would have them, told from .gitignore alone: git need not be there."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def files(*folders: str, root: Path = ROOT) -> set[str]:
    """Paths from `root` of all files below `folders` (none: everywhere) that .gitignore does not name.

    Of its syntax: NAME, NAME/ and /NAME, with * and ?. ValueError for anything else.
    """
    patterns = _patterns((root / ".gitignore").read_text())
    starts = [root / folder for folder in folders] or [root]
    return {path for start in starts for path in _below(start, root, patterns)}


def unpack(archive: Path, folder: Path) -> None:
    """A .tar.gz, with tarfile's safeguards where this Python has them: from 3.11.4 on, which Debian 12 has not."""
    with tarfile.open(archive) as content:
        if hasattr(tarfile, "data_filter"):
            content.extraction_filter = tarfile.data_filter
        content.extractall(folder)


def _patterns(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    for pattern in patterns:
        if pattern.startswith("!") or "**" in pattern or "/" in pattern.strip("/"):
            raise ValueError(f".gitignore: {pattern!r} is not understood here")
    return patterns


def _below(place: Path, root: Path, patterns: list[str]) -> Iterator[str]:
    if place.is_file() or place.is_symlink():
        yield place.relative_to(root).as_posix()
        return
    for inner in sorted(place.iterdir()):
        if inner.name != ".git" and not any(_names(pattern, inner, root) for pattern in patterns):
            yield from _below(inner, root, patterns)


def _names(pattern: str, path: Path, root: Path) -> bool:
    if pattern.endswith("/") and not path.is_dir():
        return False
    if pattern.startswith("/") and path.parent != root:
        return False
    return fnmatch(path.name, pattern.strip("/"))
