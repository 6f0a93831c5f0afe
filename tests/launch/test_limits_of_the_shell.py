"""Jobs under limits of the shell: the right result, or a text that names the limit and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from horoclone import run
from horoclone.launch import process
from horoclone.launch.job import Job
from horoclone.launch.link import HostLink, SshOptions
from horoclone.launch.usage import LaunchError

HOROCLONERUN = Path(sys.executable).with_name("horoclonerun")
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OPENBLAS_NUM_THREADS": "1"}
PROGRAM = """
import numpy as np
import horoclone as hvd
hvd.init()
print("sum", hvd.allreduce(np.ones(300_000), op=hvd.Sum)[:2].tolist(), flush=True)
"""


@pytest.fixture
def under(launch: Any, tmp_path: Path) -> Callable[..., Any]:
    def run(limit: str, ranks: int, program: str = PROGRAM, user: Sequence[str] = ()) -> Any:
        (tmp_path / "program.py").write_text(program)
        job = f"ulimit {limit}; exec {HOROCLONERUN} -np {ranks} {sys.executable} {tmp_path / 'program.py'}"
        return launch([*user, "bash", "-c", job], env=ENVIRONMENT, timeout_s=100, check=False)

    return run


GIB = 1 << 20  # as ulimit counts, in KiB


@pytest.mark.in_turn
@pytest.mark.parametrize("gib", [20, 200, 8, 4])
def test_less_address_space_makes_smaller_arenas(gib: int, under: Callable[..., Any]) -> None:
    done = under(f"-v {gib * GIB}", 3)
    assert done.stdout.count("sum [3.0, 3.0]\n") == 3, done.stderr


def test_too_little_address_space_for_shared_memory_is_said_and_the_job_runs(
    under: Callable[..., Any],
) -> None:
    done = under(f"-v {2 * GIB}", 3)
    assert done.stdout.count("sum [3.0, 3.0]\n") == 3, done.stderr
    assert "ulimit -v" in done.stderr and "TCP" in done.stderr


ONE_IS_LIMITED = """
import os, resource
if os.environ["HOROCLONE_RANK"] == "2":
    resource.setrlimit(resource.RLIMIT_AS, ({0}, {0}))
"""


@pytest.mark.in_turn
@pytest.mark.parametrize("gib", [100, 2, 8])
def test_a_rank_that_has_no_room_for_the_others_memory_uses_tcp_alone(
    gib: int, under: Callable[..., Any]
) -> None:
    """The others reserve 64 GiB each: it is not to end the job because they share what it cannot map."""
    done = under("-c 0", 4, ONE_IS_LIMITED.format(gib << 30) + PROGRAM)
    assert done.stdout.count("sum [4.0, 4.0]\n") == 4, done.stderr
    assert "TCP" in done.stderr and "ulimit -v" in done.stderr


def test_limits_that_leave_enough_change_nothing(under: Callable[..., Any]) -> None:
    done = under("-l 0 -s 256 -f 1000000 -c 0 -n 200", 2)
    assert done.stdout.count("sum [2.0, 2.0]\n") == 2, done.stderr


def test_too_few_descriptors_are_named(under: Callable[..., Any]) -> None:
    done = under("-n 24", 4)
    assert done.returncode and "ulimit -n" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr.split("root cause")[-1]


WITHOUT_MEMFD = """
# Has memfd_create fail, as some sandboxes do, and runs a command.
import ctypes, errno, os, platform, struct, sys
number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
load, equal, give = 0x20, 0x15, 0x06
rules = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x00050000 | errno.EPERM), (give, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *rule) for rule in rules)
memory = ctypes.create_string_buffer(program, len(program))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(memory))), 0, 0) == 0
try:
    os.memfd_create("x")
except PermissionError:
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_without_memory_files_the_ranks_use_tcp_and_say_so(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT_MEMFD)
    save = f"hvd.checkpoint.save({str(tmp_path / 'saves')!r}, {{'a': np.ones(3)}}, async_=False)\n"
    (tmp_path / "program.py").write_text(PROGRAM + save)
    command = [sys.executable, tmp_path / "without.py", HOROCLONERUN, "-np", "2", sys.executable]
    done = launch([*command, tmp_path / "program.py"], env=ENVIRONMENT, timeout_s=100, check=False)
    assert done.returncode == 0 and done.stdout.count("sum [2.0, 2.0]") == 2, done.stderr
    assert "no shared memory, TCP is used instead: memfd_create: " in done.stderr


@pytest.mark.parametrize("limit", [2, 6])
def test_too_few_processes_are_named(limit: int, under: Callable[..., Any]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: only another user's processes can be counted")
    reads = "+dac_read_search,+dac_override"
    user = ["setpriv", "--reuid=64321", "--regid=64321", "--clear-groups", f"--inh-caps={reads}"]
    done = under(f"-u {limit}", 2, user=[*user, f"--ambient-caps={reads}"])
    assert done.returncode and "ulimit -u" in done.stderr, done.stderr


def test_only_a_fork_that_finds_no_process_is_called_the_limit_on_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*_args: object, **_options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(Job, "_start", no_process)
    with pytest.raises(BlockingIOError):
        run(print)  # some other call of the launcher's loop
    monkeypatch.undo()
    monkeypatch.setattr(process.subprocess, "Popen", no_process)
    with pytest.raises(LaunchError, match="a process of the launcher's own: .*ulimit -u"):
        process.LocalRanks(b"secret", None)
    with pytest.raises(LaunchError, match="cannot run ssh: .*ulimit -u"):
        HostLink("elsewhere", SshOptions(), None, None)  # type: ignore[arg-type]


def test_a_launcher_without_standard_streams_takes_none_of_its_own_for_them(tmp_path: Path) -> None:
    """As of a service or a scheduler that closes them: the launcher waited for ever."""
    program = "import sys; print(repr(sys.stdin.read())); print(2, file=sys.stderr)"
    command = [HOROCLONERUN, "-np", "2", "--output-filename", tmp_path, sys.executable, "-c", program]
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *map(str, command)]
    done = subprocess.run(closed, env={**os.environ, **ENVIRONMENT}, timeout=60)
    assert done.returncode == 0
    found = [
        (tmp_path / f"rank.{rank}" / name).read_text() for rank in (0, 1) for name in ("stdout", "stderr")
    ]
    assert found == ["''\n", "2\n"] * 2
