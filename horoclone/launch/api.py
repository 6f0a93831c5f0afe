"""horoclone.run(function, ...): the launcher as a function call, one value per rank.

The function travels by cloudpickle to our own children only: through sealed memory that they inherit, on other
hosts over ssh's stdin. Their values come back the same way and are unpickled here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from horoclone import failpoints
from horoclone.errors import Unsupported
from horoclone.launch.call import ERROR, VALUE, pack_function
from horoclone.launch.elastic_policy import LONGEST_COOLDOWN_S
from horoclone.launch.environment import variables_of_caller
from horoclone.launch.link import SshOptions, package_home
from horoclone.launch.numbers import one_of, seconds, whole
from horoclone.launch.usage import LaunchError
from horoclone.settings import START_TIMEOUT_S

_T = TypeVar("_T")

# Not -m: the caller may have found horoclone by a sys.path of its own.
RANK = "import sys; sys.path.append(sys.argv.pop()); from horoclone.launch.call import main; sys.exit(main())"


_ELASTIC_FLAGS = (
    "min_np", "max_np", "host_discovery_script", "slots_per_host", "reset_limit", "blacklist_cooldown_range",
    "elastic_timeout", "host_discovery", "spares", "notice_script", "notice_signal",
)  # fmt: skip
_RUN = "run()"
_GRACE_S = 30.0


class RunError(RuntimeError):
    """A rank of run() failed. `rank` and `exit_code` are those of the rank that failed first; `__cause__` is the
    exception of the function where it could be brought over; the text is the launcher's failure report."""

    def __init__(self, text: str, rank: int, exit_code: int) -> None:
        super().__init__(text)
        self.rank = rank
        self.exit_code = exit_code


class _JobSpec(NamedTuple):
    """The arguments of run() in the launcher's words."""

    size: int
    hosts: str | None
    hostfile: str | None
    ssh: SshOptions
    start_timeout_s: float | None
    interfaces: str | None
    output_folder: str | None
    verbose: bool
    grace_s: float
    environment: dict[str, str]
    elastic: dict[str, Any]  # flags of an elastic job, None where they were not given


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    grace: float | None = None,
    elastic_timeout: float | None = None,
    host_discovery: str | None = None,
    spares: int | None = None,
    notice_script: str | None = None,
    notice_signal: str | None = None,
) -> list[_T]:
    """Calls func(*args, **kwargs) once in num_proc (or np; default 1) new processes; returns the values by rank.

    hosts, hostfile, start_timeout, ssh_port, ssh_identity_file, output_filename, verbose and network_interfaces are the
    flags of horoclonerun; grace: seconds between SIGTERM and SIGKILL (30); executable is the Python of the ranks; env
    adds variables for them; disable_cache and use_gloo are accepted and change nothing. use_mpi=True (or mpi_args)
    starts the ranks with the mpirun on PATH, on this host. func and its values must be picklable by cloudpickle.

    min_num_proc, max_num_proc, host_discovery_script or host_discovery make the job elastic, as horoclonerun's flags of
    these names do; slots, reset_limit, cooldown_range (two numbers of seconds), elastic_timeout, spares, notice_script
    and notice_signal belong to it. The values are then those of the first min_num_proc ranks of the last generation.

    Raises RunError when a rank fails, naming it (the others are stopped); TypeError and ValueError for numbers that are
    none, or out of range, by name; ValueError for arguments that do not fit together; Unsupported for an elastic job
    with mpirun; KeyboardInterrupt after Ctrl-C, when all ranks are gone.
    """
    smallest = _either("min_num_proc", min_num_proc, "min_np", min_np)
    elastic = _elastic_flags(
        smallest, _either("max_num_proc", max_num_proc, "max_np", max_np), host_discovery_script, slots, reset_limit,
        cooldown_range, elastic_timeout, host_discovery, spares, notice_script, notice_signal,
    )  # fmt: skip
    start_timeout = seconds(_RUN, "start_timeout", start_timeout)
    is_elastic = any(value is not None for value in elastic.values())
    _refuse(func, bool(use_mpi or mpi_args), bool(use_gloo), is_elastic)
    spec = _JobSpec(
        size=_either("num_proc", num_proc, "np", np) or smallest or 1,
        hosts=hosts,
        hostfile=hostfile,
        ssh=_ssh(ssh_port, ssh_identity_file, executable, start_timeout),
        start_timeout_s=start_timeout,
        interfaces=network_interfaces or network_interface,
        output_folder=os.path.abspath(output_filename) if output_filename else None,
        verbose=bool(verbose),
        grace_s=_grace_s(grace),
        environment=variables_of_caller(env),
        elastic=elastic,
    )
    call = pickled_call(func, args, kwargs)
    return _run_with_mpi(spec, mpi_args or "", call) if use_mpi or mpi_args else _run(spec, call)


def _ssh(port: int | None, key: str | None, python: str | None, timeout_s: float | None) -> SshOptions:
    port = whole(_RUN, "ssh_port", port, 1, 65535)
    return SshOptions(port, key, python or sys.executable, timeout_s or START_TIMEOUT_S, bind_to_us=False)


def _grace_s(given: Any) -> float:
    checked = seconds(_RUN, "grace", given)
    return _GRACE_S if checked is None else checked


def _either(name: str, value: Any, older_name: str, older: Any) -> int | None:
    return one_of(_RUN, (name, whole(_RUN, name, value)), (older_name, whole(_RUN, older_name, older)))


def _elastic_flags(*values: Any) -> dict[str, Any]:
    flags = dict(zip(_ELASTIC_FLAGS, values, strict=True))
    for name, least in (("slots_per_host", 1), ("reset_limit", 1), ("spares", 0)):
        flags[name] = whole(_RUN, "slots" if name == "slots_per_host" else name, flags[name], least)
    flags["elastic_timeout"] = seconds(_RUN, "elastic_timeout", flags["elastic_timeout"])
    bounds = flags["blacklist_cooldown_range"]
    if bounds is not None:
        if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
            raise TypeError(f"{_RUN}: cooldown_range must be two numbers of seconds, not {bounds!r}.")
        flags["blacklist_cooldown_range"] = [
            whole(_RUN, "cooldown_range", one, 0, LONGEST_COOLDOWN_S) for one in bounds
        ]
    return flags


def _refuse(func: Any, by_mpi: bool, by_gloo: bool, is_elastic: bool) -> None:
    failpoints.check()
    if by_mpi and is_elastic:
        raise Unsupported(
            "run(): mpirun ends a job when a rank is lost; an elastic job goes without use_mpi."
        )
    if by_mpi and by_gloo:
        raise ValueError("run(): use_mpi and use_gloo say two different things; give one of them.")
    if not callable(func):
        raise ValueError(f"run(): func must be callable, not {type(func).__name__}.")


def _run(spec: _JobSpec, function: bytes) -> list[Any]:
    try:
        result = _job(spec, function).run()
    except LaunchError as error:
        if error.exit_code == 2:
            raise ValueError(f"run(): {error}") from None
        raise RunError(f"run(): {error}", -1, error.exit_code) from None
    return values_of(result)


def _run_with_mpi(spec: _JobSpec, mpi_args: str, function: bytes) -> list[Any]:
    from horoclone.launch import mpirun

    request = mpirun.MpiRequest(
        placements=_placements(spec),
        command=[spec.ssh.python, "-c", RANK, package_home()],
        environment=_environment(spec),
        mpi_args=mpi_args,
        output_folder=spec.output_folder,
    )
    try:
        exit_code, answers = mpirun.call(request, function, spec.grace_s)
    except LaunchError as error:
        raise ValueError(f"run(): {error}") from None
    if exit_code != 0:
        rank = next((rank for rank, answer in answers.items() if answer[:1] == ERROR), -1)
        said = f"rank {rank} raised (its traceback is above)" if rank >= 0 else "mpirun says why, above"
        raise RunError(
            f"run(): mpirun ended with exit code {exit_code}; {said}", rank, exit_code
        ) from _cause(answers.get(rank, b""))
    return [_value(rank, answers[rank]) for rank in range(len(answers))]


def pickled_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """What horoclone.launch.call takes. Unsupported without cloudpickle."""
    try:
        import cloudpickle
    except ImportError:
        raise Unsupported("run() needs cloudpickle: pip install cloudpickle") from None
    path = [os.path.abspath(entry) for entry in sys.path]
    return pack_function(path, cloudpickle.dumps((func, tuple(args), dict(kwargs or {}))))


def _job(spec: _JobSpec, function: bytes) -> Any:
    from horoclone.launch.elastic_job import ElasticJob
    from horoclone.launch.job import Job, JobRequest
    from horoclone.launch.output import Screen, Style

    elastic = _elastic(spec)
    request = JobRequest(
        placements=_placements(spec) if elastic is None else [],
        command=[spec.ssh.python, "-c", RANK, package_home()],
        environment=_environment(spec),
        cwd=os.getcwd(),
        screen=Screen(Style(), shows_all=spec.verbose),
        ssh=spec.ssh,
        output_folder=spec.output_folder,
        grace_s=spec.grace_s,
        interfaces=spec.interfaces,
        function=function,
        verbose=spec.verbose,
        give_stdin=False,
    )
    return Job(request) if elastic is None else ElasticJob(request, elastic)


def _elastic(spec: _JobSpec) -> Any:
    from horoclone.launch.elastic_options import elastic_of

    where = {"num_proc": spec.size, "hosts": spec.hosts, "hostfile": spec.hostfile}
    return elastic_of(argparse.Namespace(**where, **spec.elastic), "horoclonerun")


def _placements(spec: _JobSpec) -> list[Any]:
    from horoclone.launch.cli import choose_placements

    return choose_placements(spec.size, spec.hosts, spec.hostfile)


def _environment(spec: _JobSpec) -> dict[str, str]:
    from horoclone.launch.environment import job_environment

    settings = dict(spec.environment)
    if spec.start_timeout_s is not None:
        settings["HOROVOD_START_TIMEOUT"] = f"{spec.start_timeout_s:g}"
    if spec.interfaces:
        settings["HOROVOD_GLOO_IFACE"] = spec.interfaces
    for stream in (sys.stdout, sys.stderr):  # the ranks' lines go straight to the descriptors
        if stream is not None:
            stream.flush()
    return job_environment(os.environ, settings)


def values_of(result: Any) -> list[Any]:
    """Of a job whose ranks have called a function, by rank. RunError or KeyboardInterrupt when it has failed."""
    if result.exit_code == 130:
        raise KeyboardInterrupt
    if result.exit_code != 0:
        from horoclone.launch.report import culprit

        end = culprit(result.ends)
        rank = end.rank if end is not None else -1
        raise RunError(f"run(): {result.text}", rank, result.exit_code) from _cause(
            result.results.get(rank, b"")
        )
    return [_value(rank, result.results[rank]) for rank in sorted(result.results)]


def _cause(answer: bytes | bytearray) -> BaseException | None:
    """The exception that a rank left as its answer, where it could be pickled."""
    import cloudpickle

    if answer[:1] != ERROR:
        return None
    try:
        _, cause = cloudpickle.loads(answer[1:])
    except Exception:
        return None
    return cause


def _value(rank: int, answer: bytes | bytearray) -> Any:
    import cloudpickle

    if answer[:1] != VALUE:
        text = f"run(): rank {rank} ended with exit code 0, but left no value (os._exit in the function?)"
        raise RunError(text, rank, 0)
    return cloudpickle.loads(answer[1:])
