"""Under Horovod's name: a job without MPI, started by horoclone's launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from horoclone.runner.common.util.hosts import SlotInfo
from horoclone.runner.common.util.settings import Settings
from horoclone.settings import START_TIMEOUT_S
from horoclone.stand_ins import ELASTIC, stand_in

gloo_run_elastic = stand_in("horovod.runner.gloo_run.gloo_run_elastic", ELASTIC)
launch_gloo_elastic = stand_in("horovod.runner.gloo_run.launch_gloo_elastic", ELASTIC)
launch_gloo = stand_in(
    "horovod.runner.gloo_run.launch_gloo", "Start the job with gloo_run(), horoclone.run() or horoclonerun."
)


def create_slot_env_vars(slot_info: SlotInfo) -> dict[str, str]:
    """The variables that tell a process which rank it is. With a HOROCLONE_SECRET they are all that init() needs on one
    host; on several it also needs HOROCLONE_RENDEZVOUS, which our launchers set."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return {"HOROVOD_HOSTNAME": slot_info.hostname} | {
        f"HOROVOD_{name.upper()}": str(getattr(slot_info, name)) for name in names
    }


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
    from horoclone.launch.environment import job_environment
    from horoclone.launch.job import Job, JobRequest
    from horoclone.launch.link import SshOptions
    from horoclone.launch.output import Screen, Style

    interfaces = ",".join(nics) if nics else None
    limit_s = settings.start_timeout.remaining() if settings.start_timeout is not None else START_TIMEOUT_S
    variables = {"HOROVOD_START_TIMEOUT": f"{limit_s:g}"} | (
        {"HOROVOD_GLOO_IFACE": interfaces} if interfaces else {}
    )
    result = Job(
        JobRequest(
            placements=choose_placements(settings.num_proc, settings.hosts, None),
            command=shlex.split(command) if isinstance(command, str) else list(command),
            environment=job_environment(env, variables),
            cwd=os.getcwd(),
            screen=Screen(Style(True, settings.prefix_output_with_timestamp)),
            ssh=SshOptions(settings.ssh_port, settings.ssh_identity_file, sys.executable, limit_s),
            output_folder=os.path.abspath(settings.output_filename) if settings.output_filename else None,
            interfaces=interfaces,
            verbose=bool(settings.verbose),
        )
    ).run()
    if result.exit_code != 0:
        raise RuntimeError(
            "Horovod detected that one or more processes exited with non-zero status: "
            f"{result.exit_code}. {result.text}"
        )
