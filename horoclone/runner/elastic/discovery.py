"""Under Horovod's name: what can say which hosts there are. Thread: any."""

from __future__ import annotations

from collections.abc import Mapping

from horoclone.launch.discovery import SCRIPT_S, Script, Source
from horoclone.launch.hosts import Host
from horoclone.launch.usage import LaunchError


class HostDiscovery:
    """What can say which hosts there are."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Host -> how many ranks it may run, in the order in which ranks are placed."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """A program that prints `host` or `host:slots` in each line. slots: for lines that do not say how many. limit_s:
    one that runs for longer is ended."""

    def __init__(self, discovery_script: str, slots: int | None, limit_s: float = SCRIPT_S) -> None:
        self._script = discovery_script
        self._slots = slots
        self._limit_s = limit_s

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """RuntimeError when the program fails or does not end, or a line is no host; hosts keep the order of the
        lines."""
        try:
            code, out, said = Script(self._script, self._slots, self._limit_s).run()
        except LaunchError as error:
            raise RuntimeError(f"Failed to execute discovery script: {error}") from None
        if code != 0:
            text = f"Failed to execute discovery script: {self._script}. Exit code: {code}"
            raise RuntimeError("\n".join([text, *said.strip().splitlines()[-1:]]))
        found: dict[str, int] = {}
        for line in filter(None, map(str.strip, out.splitlines())):
            name, colon, slots = line.rpartition(":")
            count = int(slots) if colon and slots.isdigit() else self._slots
            if count is None:
                raise RuntimeError(
                    f"the discovery script {self._script} does not say how many slots {line!r} has"
                )
            found[name if colon and slots.isdigit() else line] = count
        return found


class FixedHosts(HostDiscovery):
    """Hosts that are told rather than found."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Those of the last set()."""
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """From now on these."""
        self._host_slots = dict(host_slots)


class _Asked:
    """A HostDiscovery as a source of the launcher."""

    changes = True

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery

    def find(self) -> list[Host]:
        """LaunchError when the discovery fails."""
        try:
            found = self._discovery.find_available_hosts_and_slots()
        except RuntimeError as error:
            raise LaunchError(str(error), 1) from error
        return [Host(name, slots) for name, slots in found.items() if slots > 0]

    def stop(self) -> None:
        """Nothing of it can be ended from here."""


def source_of(discovery: HostDiscovery) -> Source:
    """For an elastic job of horoclone.launch, which asks it every second."""
    return _Asked(discovery)
