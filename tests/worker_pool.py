"""Worker pools: ranks that are forked from one warm process, for tests in which ranks die, stop or sit in namespaces.

A start costs milliseconds, because the warm process has imported everything before it forks; the rank itself then runs
like any program: init() in its own process, the interpreter's exception hook, exit functions and exit code. A body is a
function of the test's module; say(**facts) in it reaches the test. Run as a program, this file is the warm process.
Worlds (world.py) of folders whose tests import a large framework are forked from such processes, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pickle
import re
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from namespaces import enter_namespace

START_S = 120.0  # importing torch on a busy machine
MARK = "@said "  # begins a line that say() has written


# --- in the ranks ----------------------------------------------------------------------------------------


def say(**facts: Any) -> None:
    """A line of facts for the test, in one write. `at` is time.monotonic(), which all processes of a host share."""
    line = MARK + json.dumps({"at": time.monotonic(), **facts}) + "\n"
    os.write(1, line.encode())


def wait_for_file(path: str, timeout_s: float = 60.0) -> None:
    """Until the test, or another rank, has made it."""
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"nobody has made {path}"
        time.sleep(0.01)


def traces() -> dict[str, list[Any]]:
    """What this process holds that others could be left with: listening ports, socket names, memory files."""
    inodes, files = set(), []
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
            elif link.startswith("/memfd:"):
                files.append(os.stat(f"/proc/self/fd/{fd}").st_ino)
        except OSError:
            pass  # the descriptor of the listing itself
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    names = [
        words[7]
        for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]
        if len(words := line.split()) > 7 and words[6] in inodes
    ]
    return {"ports": ports, "names": names, "files": files}


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Its threads do nothing meanwhile, and the kernel does not count it as stopped: as when its pages are being read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    seize, interrupt, detach = 0x4206, 0x4207, 17
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    for thread in threads:
        if libc.ptrace(seize, thread, 0, 0):
            import pytest

            pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    for thread in threads:
        assert not libc.ptrace(interrupt, thread, 0, 0)
    yield
    for thread in threads:
        assert not libc.ptrace(detach, thread, 0, 0), os.strerror(ctypes.get_errno())


# --- the warm process ------------------------------------------------------------------------------------


@dataclass
class Start:
    """One rank to fork."""

    path: str
    module: str
    name: str
    kwargs: dict[str, Any]
    env: dict[str, str]
    namespace: str | None
    output: str
    descriptors: list[int] = field(default_factory=list)  # that came along; the body's first arguments


def _become(start: Start) -> None:
    """In the child: a session, an output, an environment and a network of its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    out = os.open(start.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.environ.clear()
    os.environ.update(start.env)
    if start.namespace:
        enter_namespace(start.namespace)


def _told(channel: socket.socket) -> Start | None:
    data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 8)
    if not data:
        return None
    start: Start = pickle.loads(data)
    start.descriptors = descriptors
    return start


def serve(channel: socket.socket) -> Start | None:
    """Forks what it is told to and reports pids and ends. Returns only in a child, with its Start; None at the end."""
    bell, rope = socket.socketpair()
    bell.setblocking(False)
    rope.setblocking(False)
    signal.set_wakeup_fd(rope.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # so that the ends of the ranks, which collect, touch and copy fewer pages
    channel.send(pickle.dumps(("ready",)))
    while True:
        ready, _, _ = select.select([channel, bell], [], [])
        if bell in ready:
            bell.recv(4096)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                channel.send(pickle.dumps(("ended", pid, os.waitstatus_to_exitcode(status))))
        if channel in ready:
            start = _told(channel)
            if start is None:
                return None
            pid = os.fork()
            if pid == 0:
                for one in (channel, bell, rope):
                    one.close()
                _become(start)
                return start
            for one in start.descriptors:
                os.close(one)
            channel.send(pickle.dumps(("started", pid)))


# --- in the test -----------------------------------------------------------------------------------------


class Team:
    """The ranks of one start. Numbers are ranks."""

    def __init__(
        self, worker_pool: WorkerPool, size: int, addresses: Sequence[str], server_namespace: str | None
    ) -> None:
        from horoclone.bootstrap.rendezvous import Server

        self._pool = worker_pool
        self._folder = tempfile.TemporaryDirectory(prefix="worker_pool-")
        self.size = size
        self.pids: list[int] = []
        secret = secrets.token_hex(16)
        self.job = f"worker_pool-{secrets.token_hex(4)}"
        made: list[Any] = []

        def listen() -> None:
            try:
                if server_namespace:
                    enter_namespace(server_namespace)
                made.append(Server(secret.encode(), self.job, size, list(addresses)))
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=listen)  # the server's sockets stay in the namespace of this thread
        thread.start()
        thread.join()
        if isinstance(made[0], BaseException):
            raise made[0]
        self.server: Any = made[0]
        self.env = {
            "HOROCLONE_RENDEZVOUS": ",".join(self.server.addresses),
            "HOROCLONE_SECRET": secret,
            "HOROCLONE_JOB": self.job,
            "HOROCLONE_SIZE": str(size),
            "HOROCLONE_START_TIMEOUT": "30",
        }

    def _path(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.txt")

    def output(self, rank: int) -> str:
        path = self._path(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def outputs(self) -> str:
        return "\n".join(
            f"--- rank {rank}, pid {pid}\n{self.output(rank)}" for rank, pid in enumerate(self.pids)
        )

    def said(self, rank: int, key: str) -> list[Any]:
        """Everything that the rank has said with this key, in order."""
        lines = [line for line in self.output(rank).splitlines(keepends=True) if line.startswith(MARK)]
        facts = [json.loads(line[len(MARK) :]) for line in lines if line.endswith("\n")]
        return [fact for fact in facts if key in fact]

    def wait_for(self, rank: int, key: str, timeout_s: float = 30.0) -> Any:
        """The first fact with this key; fails when the rank ends or the time is over before."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.pids[rank] in self._pool.ended() or time.monotonic() > deadline
            if found := self.said(rank, key):
                return found[0]
            if over:
                raise AssertionError(f"rank {rank} never said {key!r}:\n{self.outputs()}")
            time.sleep(0.002)

    def wait_for_output(self, rank: int, *patterns: str, timeout_s: float = 30.0) -> str:
        """The rank's output, once all of these are in it; fails when the time is over before."""
        deadline = time.monotonic() + timeout_s
        while not all(re.search(pattern, self.output(rank)) for pattern in patterns):
            assert time.monotonic() < deadline, f"rank {rank} never printed {patterns}:\n{self.outputs()}"
            time.sleep(0.01)
        return self.output(rank)

    def send(self, rank: int, number: int) -> float:
        """Sends a signal; gives the time at which that was done."""
        os.kill(self.pids[rank], number)
        return time.monotonic()

    def wait(self, timeout_s: float = 30.0, ranks: Sequence[int] | None = None) -> list[int]:
        """Exit codes by rank (negative: signal) once they have ended; fails with every output at the limit."""
        wanted = [self.pids[rank] for rank in (range(self.size) if ranks is None else ranks)]
        deadline = time.monotonic() + timeout_s
        while not all(pid in self._pool.ended() for pid in wanted):
            if time.monotonic() > deadline:
                living = [self.pids.index(p) for p in wanted if p not in self._pool.ended()]
                raise AssertionError(f"after {timeout_s:g} s ranks {living} still live:\n{self.outputs()}")
            time.sleep(0.002)
        return [self._pool.ended()[pid] for pid in wanted]

    def close(self) -> None:
        for pid in self.pids:
            if pid not in self._pool.ended():
                # It has just ended; the worker_pool's thread will say so
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.pids:
            self.wait(10)
        self.server.close()
        self._folder.cleanup()


def left_over(traces: Sequence[Mapping[str, list[Any]]]) -> str:
    """Which of these ports, names and memory files somebody still holds, as text; empty when nobody does."""
    ports = {port for one in traces for port in one["ports"]}
    names = {name for one in traces for name in one["names"]}
    files = {inode for one in traces for inode in one["files"]}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) in ports:
                found.append(f"port {int(words[1].rpartition(':')[2], 16)}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        if len(words := line.split()) > 7 and words[7] in names:
            found.append(f"socket {words[7]}")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            mapped = {int(n) for n in re.findall(r" (\d+) +/memfd:", (process / "maps").read_text())}
            for fd in (process / "fd").iterdir():
                if os.readlink(fd).startswith("/memfd:"):
                    mapped.add(os.stat(fd).st_ino)
        except OSError:
            continue  # it ended while we looked
        found += [f"memory file {inode} in pid {process.name}" for inode in mapped & files]
    return ", ".join(found)


class WorkerPool:
    """The warm process and what it reports. Thread: the test's."""

    def __init__(self, env: Mapping[str, str], *modules: str) -> None:
        import subprocess

        modules = (
            "pytest",
            "horoclone.runtime.lifecycle",
            "horoclone._core",
            "horoclone.bootstrap.exchange",
            *modules,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        self._is_ready = False
        # Read when jax is imported. Most of its tests' time is XLA's; what a rank starts anew has XLA's own settings.
        self.env = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **env}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                env=self.env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def _take(self, timeout_s: float, word: str = "") -> None:
        """Takes in what has been reported; with a word, waits for such a report."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic()) if word else 0.0
            if not select.select([self._channel], [], [], left)[0]:
                if word:
                    raise AssertionError(f"no {word!r} from the warm process within {timeout_s:g} s")
                return
            data = self._channel.recv(1 << 16)
            if not data:
                raise AssertionError("the warm process has ended")
            report = pickle.loads(data)
            if report[0] == "ended":
                self._ended[report[1]] = report[2]
            elif report[0] == "started":
                self._ended.pop(report[1], None)  # numbers of processes come round
                self._started.append(report[1])
            if report[0] == word:
                return

    def ended(self) -> dict[int, int]:
        self._take(0)
        return self._ended

    def fork(self, start: Start, descriptors: Sequence[int] = ()) -> int:
        """Gives the pid; the rank gets these descriptors."""
        if not self._is_ready:
            self._take(START_S, "ready")
            self._is_ready = True
        socket.send_fds(self._channel, [pickle.dumps(start)], list(descriptors))
        self._take(START_S, "started")
        return self._started[-1]

    def start(
        self,
        body: Callable[..., Any],
        size: int,
        *,
        env: Mapping[str, str] | None = None,
        namespaces: Sequence[str] | None = None,
        addresses: Sequence[str] = ("127.0.0.1:0",),
        **kwargs: Any,
    ) -> Team:
        """Forks `size` ranks that run body(**kwargs).

        namespaces: the network namespace of each rank, placed host by host; the rendezvous listens in the first one.
        """
        team = Team(self, size, addresses, namespaces[0] if namespaces else None)
        hosts = list(namespaces) if namespaces else [""] * size
        for rank in range(size):
            here = hosts.count(hosts[rank])
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": hosts[:rank].count(hosts[rank]),
                "LOCAL_SIZE": here,
                "CROSS_RANK": list(dict.fromkeys(hosts)).index(hosts[rank]),
                "CROSS_SIZE": len(set(hosts)),
            }
            own = {f"HOROCLONE_{name}": str(number) for name, number in numbers.items()}
            whole = {**self.env, **team.env, **own, **(env or {})}
            code = body.__code__
            job = Start(
                code.co_filename, body.__module__, body.__name__, kwargs, whole, hosts[rank] or None,
                str(team._path(rank))
            )  # fmt: skip
            team.pids.append(self.fork(job))
        return team

    def close(self) -> None:
        self._channel.close()
        self._process.wait(60)  # with torch in it the end takes seconds on a busy machine


# Folder -> what the ranks of its tests import in any case: torch._dynamo with the first optimizer.
OF_TORCH = ("torch._dynamo", "torch.distributed.fsdp", "horoclone.torch", "horoclone.torch.optimizer")
IMPORTED = {
    "torch": OF_TORCH,
    "lightning": OF_TORCH,
    "plan": ("horoclone.torch",),
    "jax": ("horoclone.jax",),
    "tensorflow": ("horoclone.tensorflow",),
}
_warm: dict[str, list[WorkerPool]] = {}


def warm_processes(
    folder: str, env: Mapping[str, str], modules: Sequence[str] | None = None
) -> list[WorkerPool]:
    """Two that have imported what the tests of this folder need, where that takes seconds; else none.

    With modules, these; instead of a folder a name then tells them from others.

    Two, so that neighbouring ranks differ as programs do in what Python draws anew for each process: the hashes of
    strings and the addresses of objects, and with them the orders of sets.
    """
    modules = IMPORTED.get(folder, ()) if modules is None else modules
    if not modules:
        return []
    if folder not in _warm:
        _warm[folder] = [WorkerPool(env, *modules) for _ in range(2)]
    return _warm[folder]


def end_warm_processes() -> None:
    for made in _warm.values():
        for pool in made:
            pool.close()
    _warm.clear()


def teams_of(worker_pool: WorkerPool) -> Iterator[Callable[..., Team]]:
    """For a fixture: gives worker_pool.start; at the end no rank of its teams lives."""
    teams: list[Team] = []

    def start(*args: Any, **kwargs: Any) -> Team:
        teams.append(worker_pool.start(*args, **kwargs))
        return teams[-1]

    try:
        yield start
    finally:
        for team in teams:
            team.close()


if __name__ == "__main__":
    _here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != _here]
    sys.path.insert(0, str(_here.parent))
    _spec = importlib.util.spec_from_file_location("world", _here / "world.py")
    assert _spec is not None and _spec.loader is not None
    _world = sys.modules["world"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_world)
    _own = _world.load(__file__, "worker_pool")
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    _channel = socket.socket(fileno=int(sys.argv[1]))
    _channel.set_inheritable(False)
    _start = _own.serve(_channel)
    if _start is not None:
        del _channel
        _body = getattr(_world.load(_start.path, _start.module), _start.name)
        _body(*_start.descriptors, **_start.kwargs)
