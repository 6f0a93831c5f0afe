"""horoclone.spark.run and run_elastic: a function on all ranks of a job, each rank in a task of a Spark application.

This process, the driver, is the launcher: it hosts the rendezvous server and the membership coordinator, starts and
ends ranks through the tasks (task_server.py), and carries their output. What they call travels as a broadcast variable
of Spark.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO, TypeVar

from horoclone.errors import Unsupported
from horoclone.launch.api import RunError, pickled_call, values_of
from horoclone.launch.elastic_options import Elastic
from horoclone.launch.elastic_policy import Cooldown, Plan
from horoclone.launch.environment import variables_of_caller
from horoclone.launch.numbers import LONGEST_S
from horoclone.launch.output import Style
from horoclone.launch.usage import LaunchError
from horoclone.spark.executor import Offer, serve_partition
from horoclone.spark.jobs import (
    SparkElasticJob,
    SparkJob,
    StreamScreen,
    environment_of,
    placements_of,
    request_of,
)
from horoclone.spark.session import Stage, active_context, too_few
from horoclone.spark.task_server import Task, TaskServer, bindings

_T = TypeVar("_T")

START_TIMEOUT_S = 600.0
ELASTIC_TIMEOUT_S = 600.0


class _JobSpec(NamedTuple):
    """The arguments that run() and run_elastic() have in common. tasks: how many; wanted: so many must start."""

    what: str
    call: bytes
    tasks: int
    wanted: int
    start_timeout_s: float
    env: Mapping[str, str] | None
    screen: StreamScreen
    verbose: int
    nics: Sequence[str] | None
    python: str | None
    barrier: bool


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[_T]:
    """Calls fn(*args, **kwargs) once on each of num_proc ranks (default: spark.default.parallelism), each a process of
    its own beside a Spark task; returns the values by rank.

    The tasks are a barrier stage: all of them start, or none does. start_timeout: seconds for that (default
    HOROVOD_SPARK_START_TIMEOUT, or 600). env adds variables for the ranks. stdout, stderr: where their lines go, each
    with the rank in front (sys.stdout, sys.stderr). verbose 2 tells of starts and ends. nics: the network interfaces of
    driver and ranks. executable: the ranks' Python (default: the executors'). use_gloo has no effect.

    Raises Unsupported without a SparkContext and for use_mpi; ValueError for arguments that cannot be; Timeout when
    fewer tasks than num_proc have started in time; RunError when a rank fails or its task is lost, with rank, node and
    cause: then the others are ended.
    """
    context = active_context()
    _refuse(fn, use_mpi, use_gloo, extra_mpi_args)
    size = _number("num_proc", num_proc, int(context.defaultParallelism))
    spec = _job_spec(
        "horoclone.spark.run", fn, args, kwargs, (size, size), start_timeout, env, stdout, stderr, verbose, nics,
        prefix_output_with_timestamp, executable, True,
    )  # fmt: skip
    with _opened(context, spec) as (server, stage, tasks):
        environment = environment_of(spec.env, spec.nics, spec.start_timeout_s)
        request = request_of(placements_of(tasks), environment, spec.screen, server, verbose)
        return _values(spec.what, SparkJob(request, stage))


def run_elastic(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    executable: str | None = None,
) -> list[_T]:
    """Runs an elastic job as run() runs one of a fixed size: fn trains in hvd.elastic.run, and goes on when ranks are
    lost or come.

    The job begins with num_proc ranks (default: spark.default.parallelism), goes on with min_num_proc at least and
    max_num_proc at most (defaults: num_proc; min_np and max_np are their older names). max_num_proc tasks are started
    as slots, each by itself: one that is lost is started again by Spark, up to spark.task.maxFailures times
    (horoclone.spark.conf has the pair for "always"). elastic_timeout: seconds that the others wait for enough ranks
    (HOROVOD_ELASTIC_TIMEOUT, or 600); reset_limit: how often ranks may change. Returns the values of the last ranks.

    Raises what run() raises; RunError only when the job cannot go on.
    """
    context = active_context()
    _refuse(fn, None, None, None)
    size = _number("num_proc", num_proc, int(context.defaultParallelism))
    smallest = _number("min_num_proc", min_num_proc if min_np is None else min_np, size)
    largest = _number("max_num_proc", max_num_proc if max_np is None else max_np, size)
    if not smallest <= size <= largest:
        raise ValueError(
            f"run_elastic: min_num_proc={smallest} <= num_proc={size} <= max_num_proc={largest} does not hold"
        )
    reset_limit = None if reset_limit is None else _number("reset_limit", reset_limit, 1)
    timeout_s = _seconds("elastic_timeout", elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT", ELASTIC_TIMEOUT_S)
    spec = _job_spec(
        "horoclone.spark.run_elastic", fn, args, kwargs, (largest, size), start_timeout, env, stdout, stderr, verbose,
        nics, prefix_output_with_timestamp, executable, False,
    )  # fmt: skip
    with _opened(context, spec) as (server, stage, _):
        plan = Plan(smallest, largest)
        elastic = Elastic(server, size, plan, Cooldown(None), timeout_s, reset_limit)
        environment = environment_of(spec.env, spec.nics, spec.start_timeout_s)
        request = request_of([], environment, spec.screen, server, verbose)
        return _values(spec.what, SparkElasticJob(request, elastic, stage, largest))


def _refuse(fn: Any, use_mpi: bool | None, use_gloo: bool | None, extra_mpi_args: str | None) -> None:
    if use_mpi or extra_mpi_args:
        raise Unsupported(
            "horoclone.spark.run: use_mpi and extra_mpi_args are not supported. Spark's tasks start the ranks, and no "
            "mpirun is needed; leave both out."
        )
    if not callable(fn):
        raise ValueError(f"horoclone.spark.run: fn must be callable, not {type(fn).__name__}")


def _number(name: str, value: int | None, default: int) -> int:
    number = default if value is None else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"horoclone.spark: {name} must be a whole number of at least 1, not {number!r}")
    return number


def _seconds(name: str, value: float | None, variable: str, default: float) -> float:
    text = os.environ.get(variable) or default
    try:
        seconds = float(text if value is None else value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < LONGEST_S:
        given = f"{variable}={text!r}" if value is None else f"{name}={value!r}"
        raise ValueError(f"horoclone.spark: {given} is not a number of seconds above 0")
    return seconds


def _job_spec(
    what: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    tasks: tuple[int, int],
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
    verbose: int,
    nics: str | Iterable[str] | None,
    timestamps: bool,
    executable: str | None,
    barrier: bool,
) -> _JobSpec:
    names = nics.split(",") if isinstance(nics, str) else sorted(nics) if nics else None
    limit_s = _seconds("start_timeout", start_timeout, "HOROVOD_SPARK_START_TIMEOUT", START_TIMEOUT_S)
    screen = StreamScreen(Style(timestamps=timestamps), stdout, stderr)
    call = pickled_call(fn, args, kwargs)
    variables = variables_of_caller(env)
    return _JobSpec(what, call, *tasks, limit_s, variables, screen, verbose, names, executable, barrier)


@contextlib.contextmanager
def _opened(context: Any, spec: _JobSpec) -> Iterator[tuple[TaskServer, Stage, list[Task]]]:
    """The driver's task server, the Spark job, and its tasks when enough have come. Nothing of them is left at the
    end."""
    secret, job = secrets.token_bytes(32), secrets.token_hex(8)
    try:
        server = TaskServer(secret, job, bindings(str(context.master), spec.nics))
    except (OSError, ValueError) as error:
        raise ValueError(f"{spec.what}: the driver cannot listen: {error}; nics chooses interfaces") from None
    offer = Offer(tuple(server.own_addresses), secret, job, spec.python)
    function = context.broadcast(spec.call)
    stage = None
    try:
        text = f"{spec.what}: {spec.wanted} ranks"
        task = functools.partial(serve_partition, offer, function)
        stage = Stage(context, spec.tasks, task, spec.barrier, text)
        yield server, stage, _tasks(context, spec, server, stage)
        server.close()
        if server.have_come(spec.tasks):  # else Spark has no room for the last, and the stage goes on
            stage.join(10.0)
    finally:
        server.close()
        if stage is not None:
            stage.cancel()
        with contextlib.suppress(Exception):  # the application may be gone
            function.destroy()


def _tasks(context: Any, spec: _JobSpec, server: TaskServer, stage: Stage) -> list[Task]:
    def look() -> None:
        if stage.over:
            raise RunError(f"{spec.what}: Spark could not run the tasks of the job: {stage.reason()}", -1, 1)

    try:
        tasks = server.wait(spec.wanted, spec.start_timeout_s, look)
    except LaunchError as error:
        raise RunError(f"{spec.what}: {error}", -1, error.exit_code) from None
    if len(tasks) < spec.wanted:
        raise too_few(context, spec.what, spec.wanted, len(tasks), spec.start_timeout_s)
    return tasks


def _values(what: str, job: Any) -> list[Any]:
    try:
        return values_of(job.run())
    except LaunchError as error:
        raise RunError(f"{what}: {error}", -1, error.exit_code) from None
