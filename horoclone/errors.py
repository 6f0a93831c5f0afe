"""Exceptions of horoclone. No imports of our own, so that the launcher and the tests can use them anywhere.

HorovodInternalError means "this step is lost, the job may go on after a reset": elastic `run` catches it. Mismatch and
Unsupported are never worth a retry.
"""

from __future__ import annotations

from collections.abc import Iterable


def with_names(text: str, names: Iterable[str]) -> str:
    """An error's text about tensors of a grouped operation, of which it says the places, with their names."""
    for place, name in enumerate(names):
        text = text.replace(f" tensor {place} as ", f" tensor {place} ({name}) as ")
    return text


class HorovodInternalError(RuntimeError):
    """Raised when a collective could not be completed. The parent of every error that the runtime itself raises."""

    def name_tensors(self, names: Iterable[str]) -> None:
        """Adds what the tensors of a grouped operation are called on this rank to a text that has their places alone:
        ranks match them by the operation's name and the place, for the names may be others elsewhere."""
        self.args = (with_names(str(self), names), *self.args[1:])


class PeerLost(HorovodInternalError):
    """Raised when another rank died, left or stopped answering. `rank` is its world rank, -1 when it is not known."""

    def __init__(self, text: str = "", rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank


class Mismatch(HorovodInternalError):
    """Raised when ranks submitted one name with different operations, dtypes, shapes, reductions, roots or scales."""


class Timeout(HorovodInternalError):
    """Raised when a deadline passed (starting, stalling, shutting down)."""


class Aborted(HorovodInternalError):
    """Raised when the job was given up: another rank raised, or this runtime was shut down with work pending."""


class Unsupported(HorovodInternalError):
    """Raised when this build, machine or layout cannot do what was asked; the text says what to do instead."""


class InvalidArgument(Unsupported, ValueError):
    """An argument that means nothing, where Horovod raises its HorovodInternalError; a ValueError all the same."""


class EmptyGroup(ValueError, IndexError):
    """A grouped operation of no tensors, where Horovod raises IndexError; a ValueError all the same."""


class ZeroFactor(ValueError, ZeroDivisionError):
    """A factor of 0 to divide by, where Horovod raises ZeroDivisionError; a ValueError all the same."""


class UnregisteredSet(ValueError, TypeError):
    """A process set that is not registered, where Horovod raises TypeError; a ValueError all the same."""


class NotATensor(TypeError, AttributeError):
    """Something else where a tensor was expected, where Horovod raises AttributeError; a TypeError all the same."""


class NotInitialized(HorovodInternalError, ValueError):
    """Raised by a call before `init()` or after `shutdown()`. It is also a ValueError, as in Horovod."""


class StateLost(RuntimeError):
    """Raised when what only one rank of an elastic job had is gone: the rank, and those that kept it for it, ended
    together."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised when hosts were added or removed. `skip_sync`: nothing was lost, so the state needs no synchronisation."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
        self.committed = False  # whether it came out of a commit, so that nothing is newer than what is saved


class HorovodVersionMismatchError(ImportError):
    """Raised when the framework that is installed is not the one that a binding was made for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} {installed_version} is installed, but this binding was made for {name} {version}. "
            f"Install {name} {version}, or reinstall horoclone."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
