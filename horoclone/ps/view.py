"""Who holds a partition: what the register says about it. Values only.

A server that was started again is another one: it has lost what it held. So a holder is a server and its generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Holder(NamedTuple):
    """A server in one of its lives."""

    server: int
    generation: int


@dataclass(frozen=True)
class Layout:
    """What all servers and workers of one parameter server have in common, written once."""

    servers: int
    replicas: int

    def home(self, partition: int) -> int:
        """The server that begins as its primary. There are as many partitions as servers."""
        return partition % self.servers

    def second(self, partition: int) -> int:
        """The server that should be its backup."""
        return (self.home(partition) + 1) % self.servers

    @property
    def partitions(self) -> int:
        """How many there are."""
        return self.servers

    def to_json(self) -> dict[str, int]:
        """For the register, and for messages."""
        return {"servers": self.servers, "replicas": self.replicas}

    @staticmethod
    def from_json(value: dict[str, int]) -> Layout:
        """What to_json() gave."""
        return Layout(value["servers"], value["replicas"])


@dataclass(frozen=True)
class View:
    """Of one partition. It changes by compare-and-set only, and then its epoch grows."""

    epoch: int
    primary: Holder
    backup: Holder | None = None
    lost: float = 0.0  # when its last copy died (seconds since 1970); 0: never

    def has(self, holder: Holder) -> bool:
        """Whether that server has a copy that counts."""
        return holder in (self.primary, self.backup)

    def alone(self, holder: Holder) -> View:
        """The next view, with one copy."""
        return replace(self, epoch=self.epoch + 1, primary=holder, backup=None)

    def joined_by(self, holder: Holder) -> View:
        """The next view, with a backup."""
        return replace(self, epoch=self.epoch + 1, backup=holder)

    def to_json(self) -> dict[str, Any]:
        """For the register."""
        return {
            "epoch": self.epoch,
            "primary": list(self.primary),
            "backup": list(self.backup) if self.backup else None,
            "lost": self.lost,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> View:
        """What to_json() gave."""
        backup = Holder(*value["backup"]) if value["backup"] else None
        return View(value["epoch"], Holder(*value["primary"]), backup, value["lost"])
