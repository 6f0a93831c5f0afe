"""The native module, horoclone._core: loaded on first use, with the exception classes handed over once."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horoclone import errors
from horoclone.membership.records import Loss
from horoclone.runtime import current

if TYPE_CHECKING:
    from horoclone._core import Runtime

_core_module: Any = None


def core() -> Any:
    """The module. ImportError with the next move when it does not load."""
    global _core_module
    if _core_module is None:
        try:
            import horoclone._core as _core
        except ImportError as error:
            raise ImportError(_why_not(error), name="horoclone._core") from error
        _core.set_error_classes(_error_factories())
        _core_module = _core
    return _core_module


def new_runtime(settings: Mapping[str, str]) -> Runtime:
    """A runtime that is not connected yet. Values of the environment, such as paths, need not be UTF-8."""
    made: Runtime = core().Runtime({name: os.fsencode(value) for name, value in settings.items()})
    return made


def bytes_of(text: str) -> bytes:
    """Of a text for people, in which what was no UTF-8 is shown as \\udcNN."""
    return text.encode("utf-8", "backslashreplace")


def _why_not(error: ImportError) -> str:
    """The reason, and what to do about it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = Path(__file__).resolve().parent.parent
    if not (isinstance(error, ModuleNotFoundError) and error.name == "horoclone._core"):
        return (
            f"horoclone's native module cannot be loaded: {error}. Reinstall horoclone for this Python ({version}): "
            "pip install --force-reinstall --no-deps horoclone"
        )
    others = sorted(file.name for file in package.glob("_core.*.so"))
    what = f"is built for another Python ({', '.join(others)})" if others else "is not built"
    if (package.parent / "CMakeLists.txt").is_file():
        return (
            f"horoclone's native module {what}: {package.parent} is a source tree. `pip install -e .` in it builds the "
            f"module for this Python ({version}); to use an installed horoclone, start Python in another folder."
        )
    return (
        f"horoclone's native module {what}: the installation in {package} is not complete. "
        f"Install horoclone with this Python ({version}): "
        f"{sys.executable} -m pip install --force-reinstall --no-deps horoclone"
    )


SILENT = " has not responded for "  # of the core's text about a rank that may live,
ENDED = " has ended. Its own output "  # and about one whose end the kernel has told to a rank on its host


def _peer_lost(text: str, culprit: int) -> errors.PeerLost:
    if culprit >= 0:
        how = Loss.ENDED if ENDED in text else Loss.SILENT if SILENT in text else Loss.UNREACHABLE
        current.lost[culprit] = max(current.lost.get(culprit, how), how)
    if (
        f"({socket.gethostname()}, pid {os.getpid()}){SILENT}" in text
    ):  # not by its number, which may be a group's
        text += ". That is this rank: the others have given it up."
    return errors.PeerLost(text, culprit)


def _error_factories() -> dict[int, Callable[[str, int], BaseException]]:
    """Code of the core (hc_code) -> maker of the exception."""
    return {
        1: lambda text, culprit: errors.NotInitialized(text),
        2: lambda text, culprit: ValueError(text),
        3: lambda text, culprit: errors.Mismatch(text),
        4: _peer_lost,
        5: lambda text, culprit: errors.Timeout(text),
        6: lambda text, culprit: errors.Aborted(text),
        7: lambda text, culprit: errors.Unsupported(text),
        8: lambda text, culprit: errors.HorovodInternalError(text),
    }
