"""Warm worker processes: a world of N ranks is started once, and every test re-initialises horoclone in it.

A test body is a plain function of its test module. It is sent by reference (file, name, arguments) and runs on every
rank between init() and shutdown(); results or tracebacks come back. A body that outlives its time limit has the stacks
and the engine state of every rank printed, and its world killed. Run as a program, this file is the worker; where
importing a framework takes seconds, workers are forked from processes that have done so (worker_pool.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import io
import json
import os
import pickle
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


class _Later:
    """A module that is imported when its first attribute is asked for."""

    def __init__(self, name: str) -> None:
        self.__dict__["_import"] = lambda: importlib.import_module(name)

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks everything that a module holds for such names, to know whether it is a test or a fixture.
        if attribute.startswith(("__", "_import", "_pytest", "_mock", "pytest_")):
            raise AttributeError(attribute)
        return getattr(self._import(), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self._import(), attribute, value)

    def __dir__(self) -> list[str]:
        return dir(self._import())


def later(name: str) -> Any:
    """`name`, imported by whoever uses it; skips the module that calls this where the package is not installed.

    Each process of pytest-xdist collects all tests, and would import every framework for the sake of the names in them.
    """
    package = name.split(".")[0]
    if importlib.util.find_spec(package) is None:
        import pytest

        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return _Later(name)


LIMIT_S = float(os.environ.get("HOROCLONE_TEST_BODY_S", "60"))  # of one test body; a slower world is killed
AFTER_FAILURE_S = 15.0  # what the other ranks have left once one has failed
START_S = 120.0  # importing torch on a busy machine
HEADER = struct.Struct("<Q")


@dataclass
class Job:
    """One body to run: what goes to every worker."""

    path: str
    module: str
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    init: bool = True


@dataclass
class Outcome:
    """What one rank made of a Job. `error` is a traceback, or how the process ended."""

    value: Any = None
    error: str | None = None
    died: bool = False


class WorldFailed(AssertionError):
    """At least one rank failed, died unasked, or ran into the time limit."""


# --- both ends of a pipe ---------------------------------------------------------------------------------


def write_message(fd: int, message: Any) -> None:
    data = pickle.dumps(message)
    data = HEADER.pack(len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def read_exactly(fd: int, count: int, deadline: float | None) -> bytes:
    """EOFError when the other side is gone, TimeoutError when the deadline (monotonic) passes."""
    parts = bytearray()
    while len(parts) < count:
        if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        data = os.read(fd, count - len(parts))
        if not data:
            raise EOFError
        parts += data
    return bytes(parts)


def read_message(fd: int, deadline: float | None = None) -> Any:
    (count,) = HEADER.unpack(read_exactly(fd, HEADER.size, deadline))
    return pickle.loads(read_exactly(fd, count, deadline))


# --- the worker ------------------------------------------------------------------------------------------


def load(path: str | Path, module: str) -> ModuleType:
    """A file as the module of this name, imported once; a test's in a worker under the name that it has in the parent."""
    path = str(path)
    if module not in sys.modules or getattr(sys.modules[module], "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


def explain(error: BaseException, path: str) -> str:
    """The traceback, with the local variables of the frame in the test's own file (assert shows none here)."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename == path]
    if isinstance(error, AssertionError) and frames:
        for name, value in frames[-1].f_locals.items():
            try:
                shown = repr(value)
            except Exception as broken:
                shown = f"<repr raised {type(broken).__name__}>"
            text += f"    {name} = {shown[:200]}\n"
    return text


def run_job(job: Job) -> Outcome:
    """init, body, shutdown; the environment is put back whatever happens."""
    before = dict(os.environ)
    os.environ.update(job.env)
    try:
        import horoclone

        try:
            body = getattr(load(job.path, job.module), job.name)
            body = getattr(body, "body", body)
            if job.init:
                horoclone.init()
            value = body(**job.kwargs)
        finally:
            if "horoclone.runtime" in sys.modules:
                horoclone.shutdown()
        return Outcome(value=value)
    except BaseException as error:  # also SystemExit: the worker must answer
        return Outcome(error=explain(error, job.path))
    finally:
        os.environ.clear()
        os.environ.update(before)


def tell_state(ask_fd: int) -> None:
    """Thread: each byte that arrives makes it write the engine's state to the log, while the main thread waits."""
    while os.read(ask_fd, 1):
        runtime = sys.modules.get("horoclone.runtime.current")
        native = getattr(runtime, "runtime", None)
        text = native.describe() if native is not None else "(horoclone is not initialised on this rank)"
        print(f"--- engine state ---\n{text}\n--- end of engine state ---", file=sys.stderr, flush=True)


def die_with_parent() -> None:
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve(jobs_fd: int, replies_fd: int, ask_fd: int) -> None:
    die_with_parent()
    for fd in (jobs_fd, replies_fd, ask_fd):
        os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != Path(__file__).resolve().parent]
    threading.Thread(target=tell_state, args=(ask_fd,), name="hc-test-state", daemon=True).start()
    write_message(replies_fd, "ready")
    while True:
        try:
            job = read_message(jobs_fd)
        except EOFError:
            return
        outcome = run_job(job)
        sys.stdout.flush()
        try:
            write_message(replies_fd, outcome)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            write_message(replies_fd, Outcome(error=f"the body's result cannot be sent back: {error}"))


# --- the parent ------------------------------------------------------------------------------------------


class Forked:
    """A child of a warm process, with what is used of subprocess.Popen."""

    def __init__(self, pool: Any, pid: int) -> None:
        self.pool, self.pid = pool, pid

    def poll(self) -> int | None:
        return self.pool.ended().get(self.pid)  # type: ignore[no-any-return]

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout_s)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Worker:
    """One rank's process, in a session of its own, with its output in a file. warm: what it is forked from."""

    def __init__(self, rank: int, env: Mapping[str, str], warm: Any = None) -> None:
        self.rank = rank
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the worker
        jobs_r, self.jobs = os.pipe()
        self.replies, replies_w = os.pipe()
        ask_r, self.ask = os.pipe()
        theirs = (jobs_r, replies_w, ask_r)
        self.process: subprocess.Popen[bytes] | Forked
        if warm is not None:
            start = sys.modules["worker_pool"].Start(
                __file__, "world", "serve", {}, dict(env), None, self.log.name
            )
            self.process = Forked(warm, warm.fork(start, theirs))
        else:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *map(str, theirs)],
                env=dict(env),
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
        for fd in theirs:
            os.close(fd)

    def output(self, start: int = 0, limit: int = 20_000) -> str:
        size = os.fstat(self.log.fileno()).st_size
        start = max(start, size - limit)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")

    def size_of_output(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe and lives on"
        return f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self) -> None:
        """Kills the process and everything that it started in its group, and reaps it."""
        for fd in (self.jobs, self.replies, self.ask):
            os.close(fd)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)
        self.log.close()


class World:
    """N warm workers and the rendezvous server that they meet at."""

    def __init__(self, size: int, env: Mapping[str, str] | None = None, warm: Sequence[Any] = ()) -> None:
        from horoclone.bootstrap.rendezvous import Server

        self.size = size
        self.env = dict(env or {})  # what is read when a worker's process imports something, and then stays
        self.warm = warm  # the processes that the workers are forked from in turn, if there are any
        self.alive = True
        self.secret = secrets.token_hex(32)
        self.job = f"test-{os.getpid()}-{secrets.token_hex(4)}"
        self.server = Server(self.secret.encode(), self.job, size, ["127.0.0.1:0"])
        self.workers = [self._start(rank) for rank in range(size)]
        deadline = time.monotonic() + START_S
        for worker in self.workers:
            try:
                assert read_message(worker.replies, deadline) == "ready"
            except (EOFError, TimeoutError):
                text = f"worker {worker.rank} of {size} did not start:\n{worker.output()}"
                self.end()
                raise WorldFailed(text) from None

    def _start(self, rank: int) -> Worker:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "HOROCLONE_"))}
        env.update(
            HOROCLONE_RENDEZVOUS=",".join(self.server.addresses),
            HOROCLONE_JOB=self.job,
            HOROCLONE_SECRET=self.secret,
            HOROCLONE_RANK=str(rank),
            HOROCLONE_SIZE=str(self.size),
            HOROCLONE_LOCAL_RANK=str(rank),
            HOROCLONE_LOCAL_SIZE=str(self.size),
            HOROCLONE_CROSS_RANK="0",
            HOROCLONE_CROSS_SIZE="1",
            OMP_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
            PYTHONUNBUFFERED="1",
            HOROCLONE_SELECTION="fixed",  # no probe, and nothing goes into the user's cache folder
        )
        env.update(self.env)
        return Worker(rank, env, self.warm[rank % len(self.warm)] if self.warm else None)

    def run(self, job: Job, limit_s: float = LIMIT_S, dies: Iterable[int] = ()) -> list[Any]:
        """Runs the body on every rank and gives its results by rank (None for those in `dies`).

        Raises WorldFailed when a rank fails or dies unasked, or when one of `dies` does not. The world is then gone,
        as it is whenever `dies` names somebody.
        """
        __tracebackhide__ = True
        starts = [worker.size_of_output() for worker in self.workers]
        expected = set(dies)
        try:
            for worker in self.workers:
                write_message(worker.jobs, job)
        except BrokenPipeError:
            pass  # it died between two tests; its outcome says so
        outcomes = self._collect(time.monotonic() + limit_s)
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        if late:
            self._dump()
        ended = [o or Outcome(error=f"no end after {limit_s:g} s") for o in outcomes]
        failed = [r for r, o in enumerate(ended) if not (o.died if r in expected else o.error is None)]
        if failed:
            text = self._report(f"{job.name}: failed on rank {failed} of {self.size}", ended, starts)
            self.end()
            raise WorldFailed(text)
        if expected:
            self.end()
        return [outcome.value for outcome in ended]

    def _collect(self, deadline: float) -> list[Outcome | None]:
        """Outcomes by rank; None for those that did not answer in time."""
        outcomes: list[Outcome | None] = [None] * self.size
        waiting = {worker.replies: worker for worker in self.workers}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for fd in ready:
                worker = waiting.pop(fd)
                try:
                    outcomes[worker.rank] = read_message(fd, time.monotonic() + 10)
                except (EOFError, TimeoutError):
                    outcomes[worker.rank] = Outcome(error=worker.how_it_ended(), died=True)
                if outcomes[worker.rank].error is not None:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        return outcomes

    def _dump(self) -> None:
        """Makes every worker that lives write its engine state and its stacks to its log."""
        living = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in living:
            os.write(worker.ask, b"?")
        time.sleep(0.5)
        for worker in living:
            worker.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def _report(self, title: str, outcomes: list[Outcome], starts: list[int]) -> str:
        lines = [title]
        for worker, outcome, start in zip(self.workers, outcomes, starts, strict=True):
            lines.append(f"===== rank {worker.rank}: {(outcome.error or 'passed').rstrip()}")
            output = worker.output(start).rstrip()
            if output:
                lines.append(f"----- rank {worker.rank}, output of this test:\n{output}")
        return "\n".join(lines)

    def end(self) -> None:
        if not self.alive:
            return
        self.alive = False
        for worker in self.workers:
            worker.end()
        self.server.close()


_pools: weakref.WeakSet[Worlds] = weakref.WeakSet()


def end_all() -> None:
    """Ends the worlds of every pool; a pool that is asked again starts others."""
    for pool in list(_pools):
        pool.end()


class Worlds:
    """A pool: one world per size, started when first asked for, replaced when it broke. env: of their processes.

    warm: what the workers are forked from, by the folder of the tests; none: they are started.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        warm: Callable[[str], Sequence[Any]] = lambda folder: (),
    ) -> None:
        self._env = dict(env or {})
        self._warm = warm
        self._worlds: dict[int, World] = {}
        _pools.add(self)

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        *,
        limit_s: float = LIMIT_S,
        env: Mapping[str, str] | None = None,
        init: bool = True,
        dies: Iterable[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `body(**kwargs)` on `size` ranks; results by rank. See World.run and ranks()."""
        __tracebackhide__ = True
        file = inspect.getfile(body)
        world = self._worlds.get(size)
        if world is None or not world.alive:
            world = self._worlds[size] = World(size, self._env, self._warm(Path(file).parent.name))
        job = Job(file, body.__module__, body.__name__, kwargs, dict(env or {}), init)
        return world.run(job, limit_s, dies)

    def end(self) -> None:
        for world in self._worlds.values():
            world.end()
        self._worlds.clear()


def ranks(
    *sizes: int,
    limit_s: float = LIMIT_S,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    dies: Iterable[int] = (),
    check: Callable[[list[Any]], None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a test of a function that runs on every rank of worlds of these sizes.

    env: variables set on every rank around init() and the body. init=False: the body calls init() itself. dies:
    ranks that the body kills. check: called in the test process with the results by rank. The body's parameters are
    filled by pytest (parametrize, fixtures with values that can be pickled).
    """
    import pytest

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        def test(world_size: int, worlds: Worlds, **kwargs: Any) -> None:
            __tracebackhide__ = True  # what the ranks said is the report
            values = worlds.run(
                world_size, body, limit_s=limit_s, env=env, init=init, dies=tuple(dies), **kwargs
            )
            if check is not None:
                check(values)

        own = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in ("world_size", "worlds", *inspect.signature(body).parameters)
        ]
        test.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        test.__name__, test.__qualname__ = body.__name__, body.__qualname__
        test.__module__, test.__doc__ = body.__module__, body.__doc__
        test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes, ids=[f"{n}ranks" for n in sizes])(test)

    return decorate


def raised(call: Callable[[], Any]) -> Exception:
    """What the call raises; AssertionError where it raises nothing."""
    try:
        value = call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; the result is {value!r}")


def alike(tensors: Iterable[Any]) -> bool:
    """Whether these tensors of torch have the same numbers on every rank."""
    import torch

    import horoclone.torch as hvd

    flat = [tensor.detach().double().flatten() for tensor in tensors]
    mine = torch.cat([torch.empty(0, dtype=torch.float64), *flat])
    rows = hvd.allgather(mine[None], name="alike")
    return all(torch.equal(row, rows[0]) for row in rows)


def wrapped_sgd(model: Any, rate: float = 0.1, momentum: float = 0.0, **options: Any) -> Any:
    """hvd.DistributedOptimizer(options) of torch's SGD for the named parameters of a model."""
    import torch

    import horoclone.torch as hvd

    sgd = torch.optim.SGD(model.parameters(), rate, momentum)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def operations() -> int:
    """How many operations this rank has submitted."""
    from horoclone import runtime

    return int(json.loads(runtime.native().counters())["operations"])


def until(what: Callable[[], Any], timeout_s: float = 30, said: Callable[[], object] | str = "") -> Any:
    """what() once it is true; fails with what is said when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, said() if callable(said) else said
        time.sleep(0.01)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ran(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, and what it has said; options are subprocess.run's."""
    return subprocess.run(
        list(map(str, command)), **{"capture_output": True, "text": True, "timeout": 120} | options
    )


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter of its own."""
    return ran(sys.executable, "-c", code, *arguments, **options)


def printed_by(script: str | Path, *arguments: str) -> str:
    """What a script prints on this rank when it runs as a program."""
    said, before = io.StringIO(), sys.argv
    sys.argv = [str(script), *arguments]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue()


@contextmanager
def starts_counted(table: Any) -> Iterator[dict[str, int]]:
    """How many submissions through this table of handles took the fast path, and how many were offered to it."""
    seen = {"short": 0, "offered": 0}
    real = table.start_plain, table.start_plain_group

    def counting(start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            handle = start(*args)
            seen["offered"] += 1
            seen["short"] += handle is not None
            return handle

        return call

    table.start_plain, table.start_plain_group = (counting(start) for start in real)
    try:
        yield seen
    finally:
        table.start_plain, table.start_plain_group = real


# Of each binding, from Horovod.
FACTS = [
    "init", "shutdown", "is_initialized", "size", "rank", "local_size", "local_rank", "cross_size", "cross_rank",
    "is_homogeneous", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built",
    "ddl_built", "ccl_built", "cuda_built", "rocm_built", "sycl_built", "start_timeline", "stop_timeline", "Average",
    "Sum", "Adasum", "Min", "Max", "Product", "Compression", "elastic", "ProcessSet", "global_process_set",
    "add_process_set", "remove_process_set",
]  # fmt: skip


def differences(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """Where `ours` does not take what `theirs` takes, in the same places; a default may be added."""
    mine = [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]
    wanted = list(inspect.signature(theirs).parameters.values())
    found = []
    for place, want in enumerate(wanted):
        if place >= len(mine) or mine[place].name != want.name or mine[place].kind != want.kind:
            found.append(f"argument {place} should be {want.name}")
        elif want.default is not want.empty and mine[place].default != want.default:
            found.append(f"{want.name} should be {want.default!r} by default")
    added = [p.name for p in mine[len(wanted) :] if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return found + [f"{name} is required" for name in added]


def check_arguments(owner: Any, table: dict[str, Callable[..., Any]]) -> None:
    """Functions of `owner` take what those of the table take."""
    wrong = {name: differences(getattr(owner, name), wanted) for name, wanted in table.items()}
    assert not {name: found for name, found in wrong.items() if found}


@contextmanager
def distributed(backend: str = "horoclone", **more: Any) -> Iterator[tuple[int, int]]:
    """A process group of torch.distributed: rank and size."""
    import torch.distributed as dist

    dist.init_process_group(backend, **more)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":  # the classes that travel belong to the module `world`, on both sides
    # A test's file may have bodies of both kinds
    load(str(Path(__file__).with_name("worker_pool.py")), "worker_pool")
    load(__file__, "world").serve(*map(int, sys.argv[1:4]))
