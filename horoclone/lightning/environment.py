"""Tells Lightning who this process is: rank and sizes from horoclone.init(), under whatever launcher started it.

It also works with other strategies of Lightning, for which it finds an address and a port. Thread: the one that trains.
"""

from __future__ import annotations

import os
import socket

from lightning.pytorch.plugins.environments import ClusterEnvironment

from horoclone import objects, runtime
from horoclone.bootstrap import detect
from horoclone.runtime import lifecycle


class HorocloneEnvironment(ClusterEnvironment):
    """Describes to Lightning the ranks that horoclonerun, mpirun, torchrun or srun has started, or one process alone.

    Making one calls horoclone.init(), unless that was done. What Lightning wants to set is ignored: the launcher has
    decided it.
    """

    def __init__(self) -> None:
        super().__init__()
        lifecycle.init()
        self._main_endpoint: tuple[str, int] | None = None

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Returns the address at which rank 0 can be reached. Collective when it is first read."""
        return self._main()[0]

    @property
    def main_port(self) -> int:
        """Returns a port that was free on rank 0. Collective when it is first read."""
        return self._main()[1]

    def _main(self) -> tuple[str, int]:
        if self._main_endpoint is None:
            given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            own = ("", 0)
            if given[0] and given[1] and not detect.torchs_by_us(os.environ):
                own = (given[0], int(given[1]))
            elif runtime.rank() == 0:
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    own = (given[0] or _address(), probe.getsockname()[1])
            self._main_endpoint = objects.broadcast_object(own, 0, "horoclone.lightning.address")
        return self._main_endpoint

    @staticmethod
    def detect() -> bool:
        """Returns whether horoclone.init() was called, or would find several ranks."""
        return runtime.is_initialized() or "HOROCLONE_RENDEZVOUS" in os.environ

    def world_size(self) -> int:
        return runtime.size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return runtime.rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return runtime.local_rank()

    def node_rank(self) -> int:
        return runtime.cross_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ValueError where Lightning's settings differ from what was started."""
        check_options(num_devices, num_nodes)


def check_options(devices: int, nodes: int) -> None:
    """Trainer's `devices` and `num_nodes` against what the launcher has started; 1, their default, says nothing."""
    options = {"devices": (devices, runtime.local_size()), "num_nodes": (nodes, runtime.cross_size())}
    for what, (wanted, found) in options.items():
        if wanted not in (1, found):
            raise ValueError(
                f"Trainer({what}={wanted}), but the launcher started {runtime.local_size()} rank(s) on this host, "
                f"{runtime.size()} on {runtime.cross_size()} host(s). Leave {what} out, and start the script with as "
                f"many ranks as you want: horoclonerun -np {wanted} python ..."
            )


def _address() -> str:
    """Of this host, for the others."""
    return "127.0.0.1" if runtime.cross_size() == 1 else socket.getfqdn()
