"""horoclonerun: turns a command line into a job. No user error makes main() end with a traceback."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Any

from horoclone.launch import options
from horoclone.launch.command_line import completing
from horoclone.launch.usage import LaunchError, parse_ranks, say, speaking_as
from horoclone.settings import START_TIMEOUT_S, core_defaults, start_timeout_s

if TYPE_CHECKING:
    from horoclone.launch.job import Job, JobResult

PROGRAM = "horoclonerun"
_DEFAULTS: dict[str, Any] = {"start_timeout": START_TIMEOUT_S, "grace": 30.0, "threads_per_rank": "auto"}


def main(argv: list[str] | None = None, program: str = PROGRAM) -> int:
    """Runs horoclonerun with `argv` (sys.argv[1:] by default) and returns the exit code."""
    _open_standard_streams()
    with speaking_as(program):
        try:
            return _run(sys.argv[1:] if argv is None else argv, program)
        except LaunchError as error:
            say(str(error))
            return error.exit_code
        except KeyboardInterrupt:  # before the job's own handlers were in place
            say("interrupted")
            return 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains once more at its end
            return 141


def _open_standard_streams() -> None:
    """Where we are started without one of them, descriptors of ours would take its number: the ranks' output would go
    into one, and rank 0 would read another."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def horovodrun(argv: list[str] | None = None) -> int:
    """The command of packages/horovodrun: horoclonerun with Horovod's prefix before every line."""
    import importlib.metadata

    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return main(["--horovod-format", *(sys.argv[1:] if argv is None else argv)], "horovodrun")
    say(
        f"Horovod {version} is installed here, and `import horovod` finds it; this command starts jobs of horoclone. "
        "Run horoclonerun for those, or `pip uninstall horovod`, or reinstall Horovod for its own horovodrun.",
        "horovodrun",
    )
    return 2


def _run(argv: list[str], program: str) -> int:
    arguments = completing(
        options.build_parser(program, core_defaults() if {"-h", "--help"} & set(argv) else {})
    ).parse_args(argv)
    if arguments.version:
        from horoclone import HOROVOD_VERSION, __version__

        print(__version__ if program == PROGRAM else HOROVOD_VERSION)  # horovodrun: as scripts expect it
        return 0
    if arguments.check_build:
        from horoclone.launch.inventory import check_build_table

        print(check_build_table(arguments.verbose))
        return 0
    from_file, tunables = _read_config(arguments)
    settings = options.rank_settings(arguments, tunables, os.environ)
    _fill(arguments, from_file)
    if arguments.print_config:
        _print_config(arguments, settings)
        return 0
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        raise LaunchError(f"nothing to run: {program} -np 2 python train.py")
    arguments.command, arguments.adds_python = _runnable(arguments.command, not _names_hosts(arguments))
    return _launch(arguments, {variable: text for variable, (text, _) in settings.items()}, program)


def _names_hosts(arguments: argparse.Namespace) -> bool:
    return any(
        (arguments.hosts, arguments.hostfile, arguments.host_discovery_script, arguments.host_discovery)
    )


def _runnable(command: list[str], here: bool) -> tuple[list[str], bool]:
    """The command, with our Python before a script that is no program, as torchrun has it, and whether that was added.
    here: on no other host."""
    script = command[0]
    program = shutil.which(script)
    file = script if os.path.isfile(script) else program
    if script.endswith(".py") and file and (program is None or not _names_interpreter(program)):
        return [sys.executable, file, *command[1:]], True
    if re.fullmatch(r"python[\d.]*", os.path.basename(script)) and len(command) > 1 and here:
        script = command[1]
    is_file = script.endswith(".py") and not script.startswith("-")
    if here and is_file and not os.path.exists(script) and shutil.which(script) is None:
        raise LaunchError(f"there is no {script!r} in {_here()}")
    return command, False


def _names_interpreter(program: str) -> bool:
    """Whether it begins with #!; also where it cannot be read, since the kernel may still run it."""
    try:
        with open(program, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


def _read_config(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    if arguments.config_file is None:
        return {}, {}
    from horoclone.launch.config_file import load

    return load(arguments.config_file)


def _fill(arguments: argparse.Namespace, from_file: dict[str, Any]) -> None:
    """Launcher flags that were not given: environment, then file, then default. Notes each origin."""
    origins: dict[str, str] = {}
    if arguments.per_host is not None:
        if arguments.num_proc not in (None, arguments.per_host):
            raise LaunchError(
                f"-np {arguments.num_proc} and --nproc-per-node {arguments.per_host} say two different things; give -np"
            )
        arguments.num_proc = arguments.per_host
    timeout = os.environ.get("HOROCLONE_START_TIMEOUT") or os.environ.get("HOROVOD_START_TIMEOUT")
    for name, value in from_file.items():
        if name == "start_timeout" and timeout:
            continue
        if getattr(arguments, name) in (None, False):
            checked = str(value) if name in ("ranks", "threads_per_rank") else value
            setattr(arguments, name, checked)
            origins[name] = "file"
    if arguments.per_host is not None and _names_hosts(arguments):
        raise LaunchError("--nproc-per-node: hosts say how many ranks they take: -np 8 -H node1:4,node2:4")
    if arguments.start_timeout is None and timeout:
        try:
            arguments.start_timeout = start_timeout_s(os.environ)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        origins["start_timeout"] = "environment"
    for name, value in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
            origins[name] = "default"
    arguments.origins = origins


def _print_config(arguments: argparse.Namespace, settings: dict[str, tuple[str, str]]) -> None:
    from horoclone.launch.config_file import ELASTIC_KEYS, LAUNCHER_KEYS

    rows = []
    for name in dict.fromkeys([*LAUNCHER_KEYS, *(flag for flag, _ in ELASTIC_KEYS.values())]):
        value = getattr(arguments, name)
        if value not in (None, False):
            rows.append((name, str(value), arguments.origins.get(name, f"--{name.replace('_', '-')}")))
    rows += [(variable, text, origin) for variable, (text, origin) in sorted(settings.items())]
    unset = [one.variable for one in options.SETTINGS if one.variable not in settings]
    width = max(len(name) for name in [*unset, *(row[0] for row in rows)])
    value_width = max(len(row[1]) for row in rows)
    for name, text, origin in rows:
        print(f"{name:<{width}}  {text:<{value_width}}  {origin}")
    for variable in unset:
        print(f"{variable:<{width}}  {'':<{value_width}}  default of the runtime")


def _launch(arguments: argparse.Namespace, settings: dict[str, str], program: str) -> int:
    from horoclone import failpoints
    from horoclone.launch import hosts as host_lists
    from horoclone.launch.elastic_job import ElasticJob
    from horoclone.launch.elastic_options import elastic_of
    from horoclone.launch.environment import job_environment
    from horoclone.launch.job import Job, JobRequest
    from horoclone.launch.link import SshOptions
    from horoclone.launch.output import STDERR, STDOUT, Screen, Style, wants_colour

    try:
        failpoints.check()
    except ValueError as error:
        raise LaunchError(str(error)) from None
    if arguments.num_proc is None and {"-np", "--num-proc"} & set(arguments.command):
        raise LaunchError(
            "how many ranks? What stands behind the command belongs to it, -np too: "
            f"{program} -np 2 {shlex.join(arguments.command[:2])} ..."
        )
    elastic = elastic_of(arguments, program)
    placements = (
        choose_placements(arguments.num_proc, arguments.hosts, arguments.hostfile) if elastic is None else []
    )
    only = parse_ranks(arguments.ranks) if arguments.ranks else None
    if only is not None and elastic is None and max(only) >= len(placements):
        raise LaunchError(f"--ranks {arguments.ranks}: the job has only ranks 0-{len(placements) - 1}")
    style = Style(
        arguments.horovod_format,
        arguments.prefix_timestamp,
        not arguments.horovod_format and wants_colour(STDOUT) and wants_colour(STDERR),
    )
    if arguments.verbose:
        for host in dict.fromkeys(one.host for one in placements):
            here = [one.rank for one in placements if one.host == host]
            way = "started directly" if host_lists.is_local(host) else "over ssh"
            say(f"{host}: {len(here)} of {len(placements)} ranks ({here[0]}-{here[-1]}), {way}")
    environment = job_environment(os.environ, {**settings, **launcher_variables(arguments)})
    if arguments.mpi or arguments.mpi_args or arguments.binding_args:
        if elastic is not None:
            raise LaunchError("mpirun ends a job when a rank is lost: an elastic job goes without --mpi")
        return _launch_with_mpi(arguments, placements, environment)
    request = JobRequest(
        placements=placements,
        command=arguments.command,
        environment=environment,
        cwd=_here(),
        screen=Screen(style, only, arguments.verbose),
        ssh=SshOptions(
            arguments.ssh_port,
            arguments.ssh_identity_file,
            arguments.remote_python or sys.executable,
            arguments.start_timeout,
            shell=arguments.remote_shell or ("srun" if arguments.host_discovery == "slurm" else "ssh"),
        ),
        output_folder=os.path.abspath(arguments.output_filename) if arguments.output_filename else None,
        grace_s=arguments.grace,
        threads=arguments.threads_per_rank,
        interfaces=arguments.network_interfaces,
        verbose=arguments.verbose,
        adds_python=arguments.adds_python,
    )
    job = Job(request) if elastic is None else ElasticJob(request, elastic)
    result = _run_watched(job, arguments, elastic is None) if _wants_views(arguments) else job.run()
    if result.text:
        say(result.brief or result.text)
    return result.exit_code


def _wants_views(arguments: argparse.Namespace) -> bool:
    return arguments.dashboard or arguments.dashboard_port is not None or arguments.metrics_port is not None


def _run_watched(job: Job, arguments: argparse.Namespace, ranks_stay: bool) -> JobResult:
    """With the views that were asked for beside it, from before its first rank starts until it has ended."""
    from horoclone.launch import report
    from horoclone.launch.views import Views

    views = Views(arguments)
    try:
        views.begin()
        result = job.run()
        codes = {end.rank: end.code for end in result.ends}
        cause = report.culprit(result.ends)
        stopped = [end.rank for end in result.ends if end is not cause and report.is_consequence(end)]
        views.end(result.exit_code, result.text, codes if ranks_stay else {}, stopped)
        return result
    finally:
        views.close()


def _launch_with_mpi(
    arguments: argparse.Namespace, placements: list[Any], environment: dict[str, str]
) -> int:
    from horoclone.launch import mpirun

    if _wants_views(arguments):
        raise LaunchError("the processes are mpirun's: look at them with `horoclone top`, or leave --mpi out")
    if arguments.ranks:
        raise LaunchError(
            "--ranks chooses among lines that mpirun prints; leave --mpi out, or use --output-filename"
        )
    if arguments.gloo:
        raise LaunchError("--gloo and --mpi say two different things; give one of them")
    request = mpirun.MpiRequest(
        placements=placements,
        command=arguments.command,
        environment=environment,
        threads=str(arguments.threads_per_rank),
        mpi_args=arguments.mpi_args or "",
        binding_args=arguments.binding_args or "",
        output_folder=os.path.abspath(arguments.output_filename) if arguments.output_filename else None,
        prefix_timestamp=arguments.prefix_timestamp,
        ssh_port=arguments.ssh_port,
        ssh_identity_file=arguments.ssh_identity_file,
    )
    if arguments.verbose:
        say(shlex.join(mpirun.command_line(mpirun.find(), request)[0]))
    return mpirun.start(request)


def launcher_variables(arguments: Any) -> dict[str, str]:
    """Variables of the ranks that come from flags of the launcher itself."""
    variables = {}
    if arguments.start_timeout is not None:
        variables["HOROVOD_START_TIMEOUT"] = f"{arguments.start_timeout:g}"
    if arguments.network_interfaces:
        variables["HOROVOD_GLOO_IFACE"] = arguments.network_interfaces
        variables["NCCL_SOCKET_IFNAME"] = arguments.network_interfaces
    if arguments.tcp:
        variables["NCCL_IB_DISABLE"] = "1"
    if arguments.why:
        variables["HOROCLONE_WHY"] = "1"
    return variables


def choose_placements(num_proc: int | str | None, hosts: str | None, hostfile: str | None) -> list[Any]:
    """-np, -H and --hostfile -> where every rank runs. LaunchError when they do not fit together."""
    from horoclone.launch.hosts import Host, automatic_size, parse_hostfile, parse_hosts, place

    if hosts and hostfile:
        raise LaunchError("-H and --hostfile both name the hosts; give one of them")
    listed = parse_hosts(hosts) if hosts else parse_hostfile(hostfile) if hostfile else None
    if num_proc is None:
        raise LaunchError("how many ranks? -np N, or -np auto")
    size = automatic_size(listed) if num_proc == "auto" else int(num_proc)
    if size < 1:
        raise LaunchError(f"-np {size}: at least one rank is needed")
    return place(size, listed or [Host("localhost", size)])


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise LaunchError(f"the current folder is gone ({error.strerror}); cd into one that exists") from None


if __name__ == "__main__":
    sys.exit(main())
