"""Under Horovod's name: the command that runs a command on another host. horoclonerun itself uses launch/link.py."""

from __future__ import annotations

from horoclone.runner.common.util import env as env_util

# Scripts replace it (other options, another ssh); what is built below uses the value of that moment.
SSH_COMMAND_PREFIX = "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no"


def get_ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """A line for a shell of this host that runs local_command (a line for the other host's shell) on `host`."""
    words = [SSH_COMMAND_PREFIX, host]
    words += [f"-p {port}"] if port is not None else []
    words += [f"-i {identity_file}"] if identity_file is not None else []
    words += [f"-o ConnectTimeout={timeout_s}"] if timeout_s is not None else []
    return " ".join([*words, local_command])


def get_remote_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """The same through the MPI Operator's kubexec.sh where the job was started with it, else get_ssh_command()."""
    if env_util.is_kubeflow_mpi():
        return f"{env_util.KUBEFLOW_MPI_EXEC} {host} {local_command}"
    return get_ssh_command(local_command, host, port, identity_file, timeout_s)
