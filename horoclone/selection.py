"""What an earlier init measured on this host (the core's probe, HOROCLONE_SELECTION), so that the next one need not.

A file in the user's cache folder and a copy in this process; what cannot be read or written is measured again. Only
rank 0's counts. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

MAX_FLAT_BYTES = 32 << 10
_found: dict[str, int] = {}  # key -> flat_bytes, of this process


def cache_file(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/horoclone/selection.json, by default under ~/.cache."""
    folder = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "horoclone" / "selection.json"


def key_of(size: int) -> str:
    """What the result depends on: version, host, cores that may be used, ranks."""
    from horoclone import __version__

    return f"{__version__}, {os.uname().nodename}, {len(os.sched_getaffinity(0))} cores, {size} ranks on one node"


def remembered(environ: Mapping[str, str]) -> dict[str, int]:
    """All that is known, by key: up to how many bytes the flat way is used."""
    known: dict[str, int] = {}
    try:
        content = json.loads(cache_file(environ).read_text())
        known = {str(key): int(value) for key, value in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    known.update(_found)
    return {key: value for key, value in known.items() if 0 <= value <= MAX_FLAT_BYTES}


def with_remembered(settings: dict[str, str], environ: Mapping[str, str], size: int) -> dict[str, str]:
    """The core's settings with what was found before, unless the user has chosen."""
    chosen = settings.get("HOROCLONE_SELECTION") or settings.get("HOROCLONE_FLAT_BYTES")
    if size < 2 or chosen or (value := remembered(environ).get(key_of(size))) is None:
        return settings
    return {**settings, "HOROCLONE_SELECTION": f"flat_bytes={value}"}


def remember(environ: Mapping[str, str], size: int, flat_bytes: int) -> None:
    """Writes the file anew with this result in it; other processes see the old or the new one, never a part."""
    _found[key_of(size)] = flat_bytes
    file = cache_file(environ)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(remembered(environ), new, indent=1)
        os.replace(new.name, file)
