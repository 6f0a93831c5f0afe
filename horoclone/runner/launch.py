"""Under Horovod's name: horovodrun, by horoclone.launch. `python -m horovod.runner.launch` is horovodrun."""

from __future__ import annotations

import os
import sys
from typing import Any

from horoclone.common.util import gloo_built as gloo_built
from horoclone.common.util import mpi_built as mpi_built
from horoclone.launch import cli, options
from horoclone.runner import _HorovodArgs
from horoclone.runner.common.util import config_parser

# Name in _HorovodArgs -> flag of the command line, for what is no tunable of options.SETTINGS.
_FLAGS = {
    "num_proc": "-np",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "config_file": "--config-file",
    "nics": "--network-interfaces",
    "mpi_args": "--mpi-args",
    "binding_args": "--binding-args",
    "verbose": "--verbose",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "tcp_flag": "--tcp",
    "prefix_output_with_timestamp": "--prefix-timestamp",
}
# The same for elastic jobs; horoclone.run() has the names on the left as arguments.
_ELASTIC = {
    "host_discovery_script": "--host-discovery-script",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
}
_PARSED_AS = {"slots": "slots_per_host", "cooldown_range": "blacklist_cooldown_range",
              "use_gloo": "gloo", "use_mpi": "mpi", "tcp_flag": "tcp", "nics": "network_interfaces",
              "prefix_output_with_timestamp": "prefix_timestamp", "no_stall_check": "stall_check"}  # fmt: skip


def run_commandline() -> None:
    """horovodrun: starts what the command line says and exits with its exit code."""
    sys.exit(cli.main(["--horovod-format", *sys.argv[1:]], "horovodrun"))


def check_build(verbose: bool) -> None:
    """Prints what this build can do and exits with 0."""
    sys.exit(cli.main(["--check-build", *(["--verbose"] if verbose else [])], "horovodrun"))


def parse_args() -> _HorovodArgs:
    """sys.argv as _run() takes it. LaunchError for a command line that is none of horovodrun's."""
    parsed = options.build_parser("horovodrun").parse_args(sys.argv[1:])
    args = _HorovodArgs()
    for name in vars(args):
        value = getattr(parsed, _PARSED_AS.get(name, name), None)
        if name == "no_stall_check" and value is not None:
            value = not value
        setattr(args, name, value)
    return args


def _run(args: _HorovodArgs) -> Any:
    """Starts args.run_func in args.num_proc processes and returns its values by rank, or args.command.

    RuntimeError when a rank of the command failed; horoclone.run() says what it raises for a function.
    """
    if args.nics is not None and not isinstance(args.nics, str):
        args.nics = ",".join(sorted(args.nics))
    if args.run_func is not None:
        return _call(args)
    if args.check_build:
        return check_build(bool(args.verbose))
    if not args.command:
        raise ValueError("horovodrun: neither run_func nor command says what to run")
    code = cli.main(_command_line(args), "horovodrun")
    if code != 0:
        raise RuntimeError(
            f"Horovod detected that one or more processes exited with non-zero status: {code}."
        )
    return None


def _call(args: _HorovodArgs) -> Any:
    from horoclone.launch.api import run

    elastic: dict[str, Any] = {
        name: getattr(args, name) for name in _ELASTIC if getattr(args, name, None) is not None
    }
    return run(
        args.run_func,
        num_proc=None if args.num_proc is None else int(args.num_proc),
        hosts=args.hosts,
        hostfile=args.hostfile,
        start_timeout=args.start_timeout,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        output_filename=args.output_filename,
        verbose=bool(args.verbose),
        use_gloo=args.use_gloo,
        use_mpi=args.use_mpi,
        mpi_args=args.mpi_args,
        network_interfaces=args.nics,
        executable=args.executable,
        env=dict(config_parser.set_env_from_args({}, args)),
        **elastic,
    )


def _command_line(args: _HorovodArgs) -> list[str]:
    words = ["--horovod-format"]
    for name, flag in {**_FLAGS, **_ELASTIC}.items():
        value = getattr(args, name, None)
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif value not in (None, False):
            words += [flag, str(value)]
    for setting in options.SETTINGS:
        value = getattr(args, config_parser._attribute(setting), None)
        if setting.flag == "stall-check" and value is not None:
            value = not value
        if value is None:
            continue
        if setting.kind is bool:
            words.append(f"--{setting.flag}" if value else f"--{setting.off_flag or 'no-' + setting.flag}")
        else:
            words.append(f"--{setting.flag}={value}")
    return [*words, *map(os.fspath, args.command or [])]


if __name__ == "__main__":
    run_commandline()
