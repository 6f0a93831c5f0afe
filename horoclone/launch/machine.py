"""An identity of a machine that tells it from another of the same name, and from itself before it was booted."""

from __future__ import annotations

from pathlib import Path

# The kernel's boot, and the start of the first process: a container on the same machine has another one.
_BOOT, _FIRST = "/proc/sys/kernel/random/boot_id", "/proc/1/stat"
ASK = f"echo $(cat {_BOOT}) $(sed 's/.*) //' {_FIRST} | cut -d ' ' -f 20)"


def own_machine() -> str:
    """What ASK prints on this machine."""
    words = []
    for path in (_BOOT, _FIRST):
        try:
            text = Path(path).read_text()
        except OSError:
            continue  # a container may hide them
        words.append(text.rpartition(") ")[2].split()[19] if path == _FIRST else text.strip())
    return " ".join(words)
