"""--dashboard and --metrics-port: what is needed is examined before the job starts, then both run beside it.

They read the ranks' metrics from threads of their own. Nothing that goes wrong with them after the start ends the job.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import socket
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from horoclone import optional
from horoclone.connection_limits import BACKLOG
from horoclone.launch.usage import LaunchError, say
from horoclone.live.job import Event, of_process
from horoclone.live.overview import Source
from horoclone.live.rank_metrics import RankMetrics

if TYPE_CHECKING:
    from horoclone.live.exposition import MetricsServer

LOCAL = "127.0.0.1"
# flag -> (packages, the extra that brings them)
NEEDS = {
    "horoclone top": (("rich",), "top"),
    "horoclone plan": (("rich",), "top"),
    "--metrics-port": (("prometheus_client",), "metrics"),
    "--dashboard": (("starlette", "uvicorn"), "dashboard"),
}


def check_packages(flag: str) -> None:
    """LaunchError names what is missing."""
    packages, _ = NEEDS[flag]
    if flag == "--dashboard" and not optional.is_there("live.dashboard"):
        raise LaunchError(
            "--dashboard: this installation of horoclone has no dashboard (horoclone.live.dashboard)", 1
        )
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(f"{flag} needs {' and '.join(missing)}: pip install {' '.join(missing)}", 1)


def endpoint(flag: str, text: str) -> tuple[str, int]:
    """[ADDRESS:]PORT -> (address, port); only this machine can connect where no address is given."""
    address, colon, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535 or (colon and not address):
        raise LaunchError(
            f"{flag} {text}: expected PORT or ADDRESS:PORT, such as 9400 or 0.0.0.0:9400; 0: any free port"
        )
    return address.removeprefix("[").removesuffix("]") or LOCAL, int(port)


def listening_socket(flag: str, address: str, port: int) -> socket.socket:
    """Bound and listening, so that a port that is taken is an error before the job starts."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
    except OSError as error:
        raise _cannot_listen(flag, address, port, error) from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise _cannot_listen(flag, address, port, error) from None
    return made


def _cannot_listen(flag: str, address: str, port: int, error: OSError) -> LaunchError:
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"{flag}: port {port} of {address} is taken; choose another, or 0 for any that is free", 1
        )
    return LaunchError(f"{flag}: cannot listen on {address} port {port}: {why}", 1)


class Views:
    """What was asked for, of one job. Made before it starts; LaunchError where something is missing or a port taken."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._metrics: MetricsServer | None = None
        self._dashboard: Any = None
        self._listening: socket.socket | None = None
        self._content: Any = None
        wants_dashboard = arguments.dashboard or arguments.dashboard_port is not None
        for flag, is_wanted in (
            ("--metrics-port", arguments.metrics_port is not None),
            ("--dashboard", wants_dashboard),
        ):
            if is_wanted:
                check_packages(flag)
        if wants_dashboard:
            address, port = endpoint("--dashboard-port", str(arguments.dashboard_port or 0))
            self._listening = listening_socket("--dashboard-port", address, port)
        if arguments.metrics_port is not None:
            self._open_metrics(*endpoint("--metrics-port", str(arguments.metrics_port)))

    def _open_metrics(self, address: str, port: int) -> None:
        from horoclone.live.exposition import MetricsServer

        try:
            self._metrics = MetricsServer(address, port, lambda text: say(f"the metrics port: {text}"))
        except OSError as error:
            self._drop_socket()
            raise _cannot_listen("--metrics-port", address, port, error) from None
        say(f"metrics: http://{_reachable(address)}:{self._metrics.port}/metrics")

    def begin(self) -> None:
        """The job of this process is about to start: it has its metrics segment, which our threads read as anybody else
        does."""
        if self._metrics is not None:
            self._metrics.show(_own_job().ranks)
        if self._listening is not None:
            self._content = optional.load("live.dashboard.content").Content(_own_job(), str(os.getpid()))
            self._dashboard = optional.load("live.dashboard.server").Dashboard(
                self._listening, self._content, say
            )
            address, port = self._listening.getsockname()[:2]
            self._dashboard.start()
            say(f"dashboard: http://{_reachable(address)}:{port}/{self._dashboard.token}/")

    def end(
        self, exit_code: int, text: str | None, codes: Mapping[int, int], stopped: Collection[int]
    ) -> None:
        """The job is over: browsers are told how. text: the launcher's report. codes: exit codes by rank, where the
        numbers of ranks did not change. stopped: those that ended since another had."""
        if self._content is not None:
            self._content.end(exit_code, _in_a_line(exit_code, text), codes, stopped)
        self.close()

    def close(self) -> None:
        if self._dashboard is not None:
            self._dashboard.close()
        self._drop_socket()
        if self._metrics is not None:
            self._metrics.close()
        self._dashboard = self._metrics = None

    def _drop_socket(self) -> None:
        if self._listening is not None:
            self._listening.close()


def _in_a_line(exit_code: int, report: str | None) -> str:
    """The launcher's report, of which the line with the root cause is the last but for Horovod's own words."""
    lines = (report or "").splitlines()
    roots = [line for line in lines if line.startswith("root cause: ")]
    return (roots or lines or ["every rank has ended well" if exit_code == 0 else "it failed"])[-1]


class _Nothing:
    """Where the launcher had no memory for a metrics segment: the job runs, and there is nothing to see."""

    def ranks(self) -> list[RankMetrics]:
        return []

    def events(self) -> list[Event]:
        return []


def _own_job() -> Source:
    """A reader of its own for each view: it is not for two threads."""
    found = of_process(os.getpid())
    return found[-1] if found else _Nothing()


def _reachable(address: str) -> str:
    """The address as a browser takes it; of a socket that listens everywhere, this host's name."""
    if address in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address
