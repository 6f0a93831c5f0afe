"""Under Horovod's name: which MPI is installed, and a job started by its mpirun."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from horoclone.launch import mpirun
from horoclone.launch.usage import LaunchError
from horoclone.runner.common.util.settings import Settings


def _family() -> str:
    try:
        return mpirun.find().family
    except LaunchError:
        return ""


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether an mpirun that we know is on PATH, or beside this interpreter. env is not looked at."""
    return _family() != ""


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether that is Open MPI's."""
    return _family() == "Open MPI"


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether that is MPICH's."""
    return _family() == "MPICH"


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether that is Intel MPI's."""
    return _family() == "Intel MPI"


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """False: IBM's Spectrum MPI is not supported."""
    return False


def mpi_run(
    settings: Settings,
    nics: Sequence[str] | None,
    env: Mapping[str, str],
    command: str | Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Runs `command` (words, or a line to be split as by a shell) under mpirun and returns when all ranks are done.

    env: the ranks' variables. stdout, stderr: files with a descriptor (None: ours). RuntimeError when mpirun fails;
    LaunchError when there is none, and for settings that do not fit together.
    """
    from horoclone.launch.cli import choose_placements
    from horoclone.launch.environment import job_environment

    variables = {"HOROVOD_GLOO_IFACE": ",".join(nics), "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}
    if settings.tcp_flag:
        variables["NCCL_IB_DISABLE"] = "1"
    request = mpirun.MpiRequest(
        placements=choose_placements(settings.num_proc, settings.hosts, None),
        command=shlex.split(command) if isinstance(command, str) else list(command),
        environment=job_environment(env, variables),
        mpi_args=settings.extra_mpi_args or "",
        binding_args=settings.binding_args or "",
        output_folder=os.path.abspath(settings.output_filename) if settings.output_filename else None,
        prefix_timestamp=settings.prefix_output_with_timestamp,
        ssh_port=settings.ssh_port,
        ssh_identity_file=settings.ssh_identity_file,
    )
    arguments, environment = mpirun.command_line(mpirun.find(), request)
    done = subprocess.run(
        arguments, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"mpirun failed with exit code {done.returncode}; it has said why")
