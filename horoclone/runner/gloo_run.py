"""Under Horovod's name: a job without MPI, started by horoclone's launcher or by a function that starts a process."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from horoclone.runner.common.util import env as env_util
from horoclone.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horoclone.runner.common.util.settings import BaseSettings, Settings
from horoclone.runner.util import network, threads
from horoclone.settings import START_TIMEOUT_S

if TYPE_CHECKING:
    from horoclone.launch.job import JobRequest, JobResult
    from horoclone.runner.elastic.settings import ElasticSettings

# exec_command(line for a shell, place, events) runs a process and gives (exit code, time) when it has ended.
ExecCommand = Callable[[str, SlotInfo, list[threading.Event]], tuple[int, float]]

_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {}\nExit code: {}\n"
)


def create_slot_env_vars(slot_info: SlotInfo) -> dict[str, str]:
    """The variables that tell a process which rank it is.

    For a place that an ElasticDriver or launch_gloo() has made they are all that init() needs, and the job's secret is
    among them: they are for that process only. For another place init() on several hosts also needs
    HOROCLONE_RENDEZVOUS and HOROCLONE_SECRET.
    """
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    variables = {"HOROVOD_HOSTNAME": slot_info.hostname} | {
        f"HOROVOD_{name.upper()}": str(getattr(slot_info, name)) for name in names
    }
    return variables if slot_info.variables is None else {**slot_info.variables(), **variables}


def create_run_env_vars(
    server_ip: str, nics: Iterable[str], port: int, elastic: bool = False
) -> dict[str, str]:
    """Horovod's variables that are alike for all processes of a job. horoclone's ranks only read the interfaces."""
    listed = list(nics)
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_ip,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": listed[0] if listed else "",
        "NCCL_SOCKET_IFNAME": ",".join(listed),
    } | ({"HOROVOD_ELASTIC": "1"} if elastic else {})


create_run_envs = create_run_env_vars  # its older name


def get_run_command(
    command: Sequence[str], server_ip: str, nics: Iterable[str], port: int, elastic: bool = False
) -> str:
    """A line for a shell that runs the command with those variables."""
    return _line(create_run_env_vars(server_ip, nics, port, elastic), shlex.join(command))


def _line(variables: Mapping[str, str], command: str) -> str:
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value]
    return " ".join([*words, command])


def register_shutdown_event() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set. ValueError outside of the main thread."""
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: event.set())
    return event


def _shutdown_event() -> threading.Event:
    """The same, where signals can be handled."""
    if threading.current_thread() is threading.main_thread():
        return register_shutdown_event()
    return threading.Event()


def _get_min_start_hosts(settings: BaseSettings) -> int:
    """1: interfaces need not be compared between two hosts first, as ranks find a way that works. Tests replace it."""
    return 1


def _line_of(run_command: str, env: Mapping[str, str], slot: SlotInfo) -> str:
    """What runs there, with its variables; the job's secret is among them, as in what Spark and ssh are given."""
    exportable = {name: value for name, value in env.items() if env_util.is_exportable(name)}
    return _line({**exportable, "PYTHONUNBUFFERED": "1", **create_slot_env_vars(slot)}, run_command)


def _raise_first(results: Mapping[Any, tuple[int, float]]) -> None:
    """RuntimeError that names the process that failed first."""
    for name, (code, _) in sorted(results.items(), key=lambda item: item[1][1]):
        if code != 0:
            raise RuntimeError(_FAILED.format(name, code))


def launch_gloo(
    command: Sequence[str],
    exec_command: ExecCommand,
    settings: Settings,
    nics: Iterable[str],
    env: Mapping[str, str],
    server_ip: str,
) -> None:
    """Runs `command` once for each rank, by exec_command(line for a shell, place, events), and waits for all.

    The line holds the job's secret: exec_command hands it on to those only whom the job belongs to. RuntimeError that
    names the process that failed first; the events of the others are set then.
    """
    from horoclone.bootstrap.rendezvous import Server
    from horoclone.launch.environment import rank_variables
    from horoclone.launch.hosts import Placement
    from horoclone.runner.elastic.generations import rendezvous_addresses

    if settings.output_filename:
        os.makedirs(settings.output_filename, exist_ok=True)
    plan = get_host_assignments(parse_hosts(settings.hosts or ""), settings.num_proc or 1, settings.num_proc)
    secret, job = os.urandom(32).hex(), os.urandom(8).hex()
    server = Server(secret.encode(), job, len(plan), rendezvous_addresses(slot.hostname for slot in plan))
    failed, told = threading.Event(), _shutdown_event()

    def variables(slot: SlotInfo) -> dict[str, str]:
        place = Placement(
            slot.rank,
            slot.size,
            slot.local_rank,
            slot.local_size,
            slot.cross_rank,
            slot.cross_size,
            slot.hostname,
        )
        own = {"HOROCLONE_SECRET": secret, "HOROCLONE_SECRET_FD": ""}
        return rank_variables(place, ",".join(server.addresses), job) | own

    def run(slot: SlotInfo) -> tuple[int, float]:
        slot.variables = partial(variables, slot)
        end = exec_command(_line_of(run_command, env, slot), slot, [told, failed])
        server.rank_ended(slot.rank, f"rank {slot.rank} ended with exit code {end[0]}")
        if end[0] != 0:
            failed.set()
        return end

    try:
        run_command = get_run_command(command, server_ip, nics, int(server.addresses[0].rpartition(":")[2]))
        found = threads.execute_function_multithreaded(run, [[slot] for slot in plan])
    finally:
        server.close()
    _raise_first(found or {})


def launch_gloo_elastic(
    command: Sequence[str],
    exec_command: ExecCommand,
    settings: ElasticSettings,
    env: Mapping[str, str],
    get_common_interfaces: Callable[[Any], Iterable[str]],
    rendezvous: Any,
) -> None:
    """The same for an elastic job: an ElasticDriver starts the processes. get_common_interfaces is called with it.

    rendezvous: a RendezvousServer that has not been started.
    """
    from horoclone.runner.elastic.driver import ElasticDriver
    from horoclone.runner.elastic.rendezvous import create_rendezvous_handler

    if settings.output_filename:
        os.makedirs(settings.output_filename, exist_ok=True)
    told = _shutdown_event()
    driver = ElasticDriver(
        rendezvous,
        settings.discovery,
        settings.min_num_proc,
        settings.max_num_proc,
        timeout=settings.elastic_timeout,
        reset_limit=settings.reset_limit,
        cooldown_range=settings.cooldown_range,
        verbose=settings.verbose,
    )
    try:
        port = rendezvous.start(create_rendezvous_handler(driver))
        driver.wait_for_available_slots(settings.num_proc or 1)
        nics = list(get_common_interfaces(driver))
        run_command = get_run_command(command, network.get_driver_ip(nics), nics, port, elastic=True)

        def create_worker(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
            return exec_command(_line_of(run_command, env, slot), slot, [told, *events])

        driver.start(settings.num_proc or 1, create_worker)
        results = driver.get_results()
    finally:
        driver.stop()
    if results.error_message is not None:
        raise RuntimeError(results.error_message)
    _raise_first(results.worker_results)


def gloo_run_elastic(settings: ElasticSettings, env: Mapping[str, str], command: str | Sequence[str]) -> None:
    """gloo_run() of an elastic job: settings.discovery says which hosts there are. A job as of horovodrun --min-np.

    RuntimeError, with the launcher's report, when the job fails.
    """
    from horoclone.launch.elastic_job import ElasticJob
    from horoclone.launch.elastic_options import Elastic
    from horoclone.launch.elastic_policy import Cooldown, Plan
    from horoclone.runner.elastic.discovery import source_of

    size = settings.num_proc or settings.min_num_proc or 1
    bounds = settings.cooldown_range
    elastic = Elastic(
        source_of(settings.discovery),
        size,
        Plan(settings.min_num_proc or size, settings.max_num_proc, whole_host=True),
        Cooldown((bounds[0], bounds[1]) if bounds else None),
        float(settings.elastic_timeout or 600),
        settings.reset_limit,
    )
    _check(ElasticJob(_request(settings, settings.nics, env, command, []), elastic).run())


def gloo_run(
    settings: Settings,
    nics: Sequence[str] | None,
    env: Mapping[str, str],
    server_ip: str | None,
    command: str | Sequence[str],
) -> None:
    """Runs `command` (words, or a line to be split as by a shell) once for each rank and returns when all are done.

    env: the ranks' variables. server_ip is not needed. RuntimeError, with the launcher's report, when a rank fails;
    LaunchError for settings that do not fit together.
    """
    from horoclone.launch.cli import choose_placements
    from horoclone.launch.job import Job

    placements = choose_placements(settings.num_proc, settings.hosts, None)
    _check(Job(_request(settings, nics, env, command, placements)).run())


def _request(
    settings: BaseSettings,
    nics: Iterable[str] | None,
    env: Mapping[str, str],
    command: str | Sequence[str],
    placements: list[Any],
) -> JobRequest:
    from horoclone.launch.environment import job_environment
    from horoclone.launch.job import JobRequest
    from horoclone.launch.link import SshOptions
    from horoclone.launch.output import Screen, Style

    interfaces = ",".join(nics) if nics else None
    limit_s = settings.start_timeout.remaining() if settings.start_timeout is not None else START_TIMEOUT_S
    variables = {"HOROVOD_START_TIMEOUT": f"{limit_s:g}"} | (
        {"HOROVOD_GLOO_IFACE": interfaces} if interfaces else {}
    )
    return JobRequest(
        placements=placements,
        command=shlex.split(command) if isinstance(command, str) else list(command),
        environment=job_environment(env, variables),
        cwd=os.getcwd(),
        screen=Screen(Style(True, settings.prefix_output_with_timestamp)),
        ssh=SshOptions(settings.ssh_port, settings.ssh_identity_file, sys.executable, limit_s),
        output_folder=os.path.abspath(settings.output_filename) if settings.output_filename else None,
        interfaces=interfaces,
        verbose=bool(settings.verbose),
    )


def _check(result: JobResult) -> None:
    if result.exit_code != 0:
        raise RuntimeError(
            "Horovod detected that one or more processes exited with non-zero status: "
            f"{result.exit_code}. {result.text}"
        )
