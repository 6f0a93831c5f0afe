"""Keeps what an earlier init measured (the core's probes, HOROCLONE_SELECTION), so that the next one need not.

It is kept in a file in the user's cache folder and in this process; what cannot be read or written is measured again.
Only rank 0's counts. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_FLAT_BYTES = 32 << 10
WAYS = ("tcp", "mpi")  # for data between nodes
MAX_ENTRIES = 200  # the newest stay
MAX_WAYS_SENT = 50  # with an introduction, which is bounded
_found: dict[str, int | str] = {}  # of this process: key -> flat_bytes, or one of WAYS


def cache_file(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/horoclone/selection.json, by default under ~/.cache."""
    folder = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "horoclone" / "selection.json"


def key_of(size: int) -> str:
    """What the result depends on: version, host, cores that may be used, ranks."""
    from horoclone import __version__

    return f"{__version__}, {os.uname().nodename}, {len(os.sched_getaffinity(0))} cores, {size} ranks on one node"


def _chosen(environ: Mapping[str, str]) -> str:
    return environ.get("HOROCLONE_SELECTION") or environ.get("HOROCLONE_FLAT_BYTES") or ""


def _possible(value: Any) -> bool:
    return value in WAYS if isinstance(value, str) else type(value) is int and 0 <= value <= MAX_FLAT_BYTES


def remembered(environ: Mapping[str, str]) -> dict[str, int | str]:
    """All that is known, by key: up to how many bytes algorithms are flat, or how data goes between these nodes."""
    known: dict[str, Any] = {}
    try:
        known = {str(key): value for key, value in json.loads(cache_file(environ).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    known.update(_found)
    return {key: value for key, value in known.items() if _possible(value)}


def with_remembered(settings: dict[str, str], environ: Mapping[str, str], size: int) -> dict[str, str]:
    """The core's settings with what was found before, unless the user has chosen."""
    if size < 2 or _chosen(settings) or (value := remembered(environ).get(key_of(size))) is None:
        return settings
    return {**settings, "HOROCLONE_SELECTION": f"flat_bytes={value}"}


def digest_of(key: str) -> str:
    """A key, short enough to be sent along with others."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def known_ways(environ: Mapping[str, str]) -> dict[str, str]:
    """By the digest of the key: how data goes between nodes. Nothing when the user has set HOROCLONE_SELECTION."""
    if _chosen(environ):
        return {}
    ways = [(digest_of(key), way) for key, way in remembered(environ).items() if isinstance(way, str)]
    return dict(ways[-MAX_WAYS_SENT:])


def learn(environ: Mapping[str, str], size: int, counters: Mapping[str, Any], way_key: str) -> None:
    """Remembers what an init has measured, if it has: `counters` are the core's, after it."""
    if counters["selection"] == "probe" and not way_key:
        remember(environ, key_of(size), counters["autotune"]["flat_bytes"])
    if counters["way_probes"] and way_key and not _chosen(environ):
        remember(environ, way_key, counters["between_nodes"])


def remember(environ: Mapping[str, str], key: str, value: int | str) -> None:
    """Rewrites the file with this result in it; other processes see the old or the new one, never a part."""
    _found.pop(key, None)
    _found[key] = value
    file = cache_file(environ)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(dict(list(remembered(environ).items())[-MAX_ENTRIES:]), new, indent=1)
        os.replace(new.name, file)
