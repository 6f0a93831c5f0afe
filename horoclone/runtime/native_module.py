"""The native module, horoclone._core: loaded on first use, with the exception classes handed over once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from horoclone import errors
from horoclone.runtime import current

_core_module: Any = None


def core() -> Any:
    """The module. ImportError with the next move when it does not load."""
    global _core_module
    if _core_module is None:
        try:
            from horoclone import _core
        except ImportError as error:
            raise ImportError(
                f"horoclone's native module cannot be loaded: {error}. Reinstall horoclone for this Python "
                f"({sys.version_info.major}.{sys.version_info.minor}); in a source tree: pip install -e ."
            ) from error
        _core.set_error_classes(_error_factories())
        _core_module = _core
    return _core_module


def _peer_lost(text: str, culprit: int) -> errors.PeerLost:
    if culprit >= 0:
        current.lost.add(culprit)
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
