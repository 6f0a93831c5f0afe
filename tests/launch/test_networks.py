"""Jobs in network namespaces of their own: without an interface, with loopback only, with one kind of address only."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HOROCLONERUN = Path(sys.executable).with_name("horoclonerun")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np
import horoclone as hvd
hvd.init()
print("sum", hvd.allreduce(np.ones(3), op=hvd.Sum).tolist(), flush=True)
"""
UP = "ip link set lo up"
NETWORKS = {
    "no interface": ":",
    "loopback": UP,
    "IPv4 only": f"{UP}; ip addr del ::1/128 dev lo",
    "IPv6 only": f"{UP}; ip addr del 127.0.0.1/8 dev lo",
}


@pytest.fixture
def in_network(launch: Any) -> Callable[..., Any]:
    def run(commands: str, *command: str | Path) -> Any:
        words = ["unshare", "-n", "bash", "-c", f'{commands}; exec "$@"', "bash", *command]
        return launch(words, env={"PYTHONPATH": str(ROOT)}, timeout_s=60, check=False)

    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare and ip are not installed: apt-get install util-linux iproute2")
    if run(UP, "true").returncode:
        pytest.skip("this process may not make network namespaces")
    return run


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.in_turn
@pytest.mark.parametrize("network", NETWORKS)
def test_the_ranks_of_one_machine_need_no_network(
    in_network: Callable[..., Any], network: str, program: Path
) -> None:
    alone = in_network(NETWORKS[network], sys.executable, program)
    assert alone.stdout == "sum [1.0, 1.0, 1.0]\n", alone.stderr
    two = in_network(NETWORKS[network], HOROCLONERUN, "-np", "2", sys.executable, program)
    assert two.stdout.count("sum [2.0, 2.0, 2.0]\n") == 2, two.stderr


def test_ranks_without_shared_memory_say_that_they_need_an_interface(
    in_network: Callable[..., Any], program: Path
) -> None:
    done = in_network(
        NETWORKS["no interface"], "env", "HOROCLONE_SHARED_MEMORY=0", HOROCLONERUN, "-np", "2",
        sys.executable, program
    )  # fmt: skip
    assert done.returncode and "ip link set lo up" in done.stderr, done.stderr


def test_the_address_of_a_bridge_is_not_the_first_that_others_are_told(
    in_network: Callable[..., Any],
) -> None:
    networks = {"docker0": "172.17.0.1/16", "eth0": "10.1.0.5/24", "ib0": "10.2.0.5/24"}
    commands = "; ".join(
        f"ip link add {name} type bridge; ip addr add {address} dev {name}; ip link set {name} up"
        for name, address in networks.items()
    )
    commands = f"{UP}; {commands}; ip route add default via 10.1.0.1"
    if in_network(f"set -e; {commands}", "true").returncode:
        pytest.skip("no bridges can be made here")
    code = "from horoclone.bootstrap import wire; print(wire.routable_addresses(), wire.address_towards('10.2.0.9'))"
    done = in_network(commands, sys.executable, "-c", code)
    assert done.stdout == "['10.1.0.5', '172.17.0.1', '10.2.0.5', '127.0.0.1'] 10.2.0.5\n", done.stderr
