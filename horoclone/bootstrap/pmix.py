"""The first contact under Open MPI 5's mpirun across hosts: through its PMIx server, without mpi4py and MPI_Init.

Finds the library that the launcher itself uses and lets a child process speak to the server (pmix_client.py says why).
Only one blob of rank 0 travels; the server belongs to the launcher and accepts this job's processes only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from horoclone import errors

CLIENT = Path(__file__).with_name("pmix_client.py")
NAME = "libpmix.so.2"
FOLDERS = ("lib/openmpi", "lib", "lib64", "lib64/openmpi", "lib/pmix", "lib64/pmix")
ANCESTORS = 8  # between the launcher's process and ours: shells, wrappers, numactl
GRACE_S = 2.0  # for a child to give up by itself before it is killed
VERSION_S = 10.0

_exchanges = 0  # that succeeded in this process
_failure = ""  # why the last one could not be done with PMIx


class Unavailable(Exception):
    """PMIx cannot be used; the message is a clause that says why. Nobody has been told anything yet."""


def refusal(environ: Mapping[str, str]) -> str:
    """Why this process is not offered PMIx by a launcher that we know; empty when it is."""
    if not all(name in environ for name in ("PMIX_RANK", "PMIX_NAMESPACE")):
        return "PMIX_RANK and PMIX_NAMESPACE are not set"
    if not any(name.startswith("PMIX_SERVER_URI") for name in environ):
        return "PMIX_SERVER_URI* is not set"
    if "PRTE_LAUNCHED" not in environ:
        return "the launcher is not that of Open MPI 5 (PRTE_LAUNCHED is not set)"
    if not sys.executable:
        return "this program is not run by a Python interpreter that could be started again"
    return ""


def find_library(environ: Mapping[str, str]) -> str:
    """The launcher's own libpmix: mapped by mpirun (or its daemon) above us, beside it, or the loader's choice."""
    launchers = list(_ancestors())
    for pid in launchers:
        for path in _mapped(pid):
            if os.path.isfile(path):
                return path
    for prefix in _prefixes(launchers, environ):
        for folder in FOLDERS:
            if (beside := prefix / folder / NAME).is_file():
                return str(beside)
    return NAME


def broadcast(environ: Mapping[str, str], rank: int, size: int, blob: bytes, deadline: float) -> bytes:
    """Rank 0's blob (at most 16 KiB), on every rank. Every process of the launcher calls; rank 0 waits for none.

    Unavailable while nothing has been published; Timeout when rank 0 has not come at the deadline.
    """
    global _exchanges, _failure
    reason = refusal(environ)
    if reason:
        raise Unavailable(reason)
    limit_s = max(0.1, deadline - time.monotonic())
    words = [str(rank), str(size), f"{limit_s:.3f}"]
    verdict, text = _ask(find_library(environ), words, environ, blob.hex() + "\n", limit_s + GRACE_S)
    if verdict == "late":
        raise errors.Timeout(
            f"rank {rank} waited {limit_s:.0f} s at the launcher's PMIx server: {text}. Has rank 0 called "
            "hvd.init()? If a host has no usable libpmix, pass hvd.init(comm=MPI.COMM_WORLD) of mpi4py on all ranks."
        )
    try:
        if verdict != "ok":
            raise Unavailable(text)
        blob = bytes.fromhex(text)
    except (Unavailable, ValueError) as error:
        _failure = str(error)
        raise Unavailable(_failure) from error
    _exchanges, _failure = _exchanges + 1, ""
    return blob


def explain(environ: Mapping[str, str]) -> str:
    """`PMIx (OpenPMIx 5.0.8, path)`, or `mpi4py, as PMIx cannot be used: why`. Loads the library in a child process."""
    reason = refusal(environ) or _failure
    if not reason:
        path = find_library(environ)
        verdict, text = _ask(path, [], environ, "", VERSION_S)
        if verdict == "ok":
            return f"PMIx ({text}, {path})"
        reason = text
    return f"mpi4py, as PMIx cannot be used: {reason}"


def _ask(
    library: str, words: list[str], environ: Mapping[str, str], line: str, limit_s: float
) -> tuple[str, str]:
    """Runs the child. (`ok`, answer), (`late`, what is missing) or (`unusable`, why)."""
    command = [sys.executable, "-I", "-S", str(CLIENT), library, str(os.getpid()), *words]
    try:
        done = subprocess.run(
            command,
            input=line,
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=limit_s,
        )
    except OSError as error:
        return "unusable", f"{sys.executable} cannot be started: {error}"
    except subprocess.TimeoutExpired:
        return "late", "no answer"
    verdict, _, text = done.stdout.strip().partition(" ")
    if done.returncode == 0 and verdict in ("ok", "late", "unusable"):
        return verdict, text
    said = " / ".join(done.stderr.split("\n"))[-300:]
    return "unusable", f"the PMIx client ended with code {done.returncode}: {said}"


def _ancestors() -> Iterator[int]:
    """Processes above this one, the nearest first; only root's and this user's, as their libraries are believed."""
    pid = os.getppid()
    for _ in range(ANCESTORS):
        try:
            if pid <= 1 or os.stat(f"/proc/{pid}").st_uid not in (0, os.geteuid()):
                return
            yield pid
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def _mapped(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            paths = [line.split(maxsplit=5)[5].strip() for line in file if "/libpmix.so" in line]
    except (OSError, IndexError):
        return []
    return list(dict.fromkeys(paths))


def _prefixes(launchers: list[int], environ: Mapping[str, str]) -> Iterator[Path]:
    """Folders in which an Open MPI or a PMIx may be installed."""
    for name in ("PMIX_PREFIX", "OPAL_PREFIX"):
        if environ.get(name):
            yield Path(environ[name])
    for pid in launchers:
        try:
            program = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            continue
        if os.path.basename(program) in ("mpirun", "mpiexec", "prterun", "prted", "prte"):
            yield Path(program).parent.parent
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    if mpirun:
        yield Path(mpirun).resolve().parent.parent
