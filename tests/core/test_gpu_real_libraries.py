"""Our declarations and our loader against the real headers and libraries, which come as packages; without a GPU.

The packages are large: each is fetched once, and what is needed of it is kept in build/nvidia; a newest one, which has no
version below, is looked for anew after a week. Where one cannot be had, its test is skipped and says which.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from world import ran

core = pytest.importorskip("horoclone._core", reason="the native module is not built")

ROOT = Path(__file__).resolve().parents[2]
ABI = ROOT / "tests/core/abi"
KEPT = ROOT / "build/nvidia"
NEWEST_FOR_S = 7 * 86400
WANTED = ("/cuda.h", "/nvrtc.h", "/nccl.h", "/libnccl.so.2", "/libnvrtc.so.12", "/libnvrtc.so.13")
NCCL = (
    "nvidia-nccl-cu12==2.18.3", "nvidia-nccl-cu12==2.21.5", "nvidia-nccl-cu12==2.27.5", "nvidia-nccl-cu13==2.28.9",
    "nvidia-nccl-cu13",
)  # fmt: skip
CUDA = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
NVRTC = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvrtc")
HIP = ("triton==3.1.0", "triton==3.9.0")  # they have the headers of HIP 6.1 and 7.1
# ROCm 5.2, whose hipRTC is in HIP's library.
HIPRTC = ("libamdhip64-5", "libamd-comgr2", "libhsa-runtime64-1", "libhsakmt1")
# The first test of a package waits until it is downloaded.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long(120)]


def package(spec: str) -> Path:
    """The folder with the headers and libraries of a package; skips where it cannot be fetched."""
    folder = KEPT / spec.replace("==", "-")
    complete = folder / "complete"
    if complete.exists() and ("==" in spec or time.time() - complete.stat().st_mtime < NEWEST_FOR_S):
        return folder
    fetched = KEPT / f"{folder.name}-wheel"
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", fetched,
        spec
    ]  # fmt: skip
    try:
        done = ran(*command, timeout=600)
        failed = "" if done.returncode == 0 else f"cannot be installed here: {done.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        failed = "could not be fetched within 10 minutes"
    wheels = list(fetched.glob("*.whl"))
    if failed or not wheels:
        if complete.exists():
            return folder
        pytest.skip(f"{spec} {failed or 'is no wheel'}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if name.endswith(WANTED) or "/libnvrtc-builtins.so" in name:
                (folder / Path(name).name).write_bytes(wheel.read(name))
            if "/include/hip/" in name and name.endswith(".h"):
                header = folder / name.partition("/include/")[2]
                header.parent.mkdir(parents=True, exist_ok=True)
                header.write_bytes(wheel.read(name))
    complete.write_text(wheels[0].name + "\n")
    shutil.rmtree(fetched)
    return folder


def compare(source: str, folder: Path, tmp_path: Path, *more: Path) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / source
    places = [f"-I{place}" for place in (folder, ABI, ROOT / "csrc", ROOT / "csrc/include", *more)]
    # Nothing is called: the addresses of what the libraries define are left open.
    link = ["-o", program, "-Wl,--unresolved-symbols=ignore-all"]
    built = ran(compiler, "-std=c++20", *places, ABI / f"{source}.cc", *link)
    assert built.returncode == 0, built.stderr[-3000:]
    done = ran(program)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("spec", CUDA)
def test_our_declarations_of_the_driver_are_nvidias(spec: str, tmp_path: Path) -> None:
    assert "0 differ" in compare("cuda", package(spec), tmp_path)


@pytest.mark.parametrize("spec", NCCL)
def test_our_declarations_of_nccl_are_nvidias(spec: str, tmp_path: Path) -> None:
    assert "0 differ" in compare("nccl", package(spec), tmp_path, ABI / "runtime")


@pytest.mark.parametrize("spec", NVRTC)
def test_our_declarations_of_nvrtc_are_nvidias(spec: str, tmp_path: Path) -> None:
    assert "0 differ" in compare("nvrtc", package(spec), tmp_path)


@pytest.mark.parametrize("spec", HIP)
def test_our_declarations_of_hip_are_amds(spec: str, tmp_path: Path) -> None:
    assert "0 differ" in compare("hip", package(spec), tmp_path)


def report(beside: Path | None = None, **settings: Any) -> Any:
    given = {f"HOROCLONE_{name}": str(value) for name, value in settings.items()}
    code = "import json, sys, horoclone._core as core; print(core.device_report(json.loads(sys.argv[1])))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROCLONE_")}
    if beside is not None:
        env["LD_LIBRARY_PATH"] = str(beside)
    done = ran(sys.executable, "-c", code, json.dumps(given), timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("spec", NCCL)
def test_the_real_nccl_is_loaded_and_has_what_its_version_should(spec: str, fakes: Path) -> None:
    library = package(spec) / "libnccl.so.2"
    found = report(CUDA_LIBRARY=fakes / "libcuda.so.1", NCCL_LIBRARY=library, GPU_KERNELS="off")["nccl"]
    assert found["found"], found
    if "==" in spec:
        assert found["version"] == spec.partition("==")[2]
    assert found["features"]["buffers"] == (found["code"] >= 21900)
    assert found["features"]["windows"] == (found["code"] >= 22700)


def kernels_of_tests() -> Any:
    path = ROOT / "tests/core/test_gpu_kernels.py"
    found = importlib.util.spec_from_file_location("gpu_kernels", path)
    assert found is not None and found.loader is not None
    kernels = importlib.util.module_from_spec(found)
    found.loader.exec_module(kernels)
    return kernels


@pytest.mark.parametrize("spec", NVRTC)
def test_the_real_nvrtc_compiles_every_kernel(spec: str, fakes: Path, tmp_path: Path) -> None:
    kernels = kernels_of_tests()
    library = next(package(spec).glob("libnvrtc.so.1?"))
    for capability in (70, 75, 80, 90, 100, 120):
        if capability < 75 and library.suffix == ".13":
            continue  # CUDA 13 has left that generation
        cache = tmp_path / str(capability)
        env = {
            **kernels.environment(fakes, cache, capability),
            "HOROCLONE_NVRTC_LIBRARY": str(library),
            "HC_FAKE_CUDA_VERSION": f"{library.suffix[1:]}000",
        }
        assert kernels.one_rank(env) == 4, "two allreduces, each packed and unpacked"
        code = kernels.compiled(cache).read_bytes()
        assert f"sm_{capability}-" in kernels.compiled(cache).name
        assert all(name.encode() in code for name in kernels.kernel_names())


def rocm() -> Path:
    """The folder with the libraries of HIPRTC, from Debian's packages, which are not installed; skips elsewhere."""
    folder = ROOT / "build/rocm"
    inside = folder / "usr/lib/x86_64-linux-gnu"
    if not (folder / "complete").exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            pytest.skip("no apt-get, which brings Debian's packages of ROCm")
        folder.mkdir(parents=True, exist_ok=True)
        fetched = ran("timeout", "250", "apt-get", "download", "-qq", *HIPRTC, cwd=folder, timeout=300)
        if fetched.returncode != 0:
            pytest.skip(f"Debian's packages of ROCm cannot be had: {fetched.stderr.strip()[-300:]}")
        for file in folder.glob("*.deb"):
            assert ran("dpkg", "-x", file, folder).returncode == 0
            file.unlink()
        (folder / "complete").touch()
    return inside


def test_the_real_hiprtc_compiles_every_kernel(fakes: Path, tmp_path: Path) -> None:
    inside = rocm()
    library, cache = inside / "libamdhip64.so.5", tmp_path / "cache"
    found = report(
        inside, CUDA_LIBRARY=fakes / "hip/libamdhip64.so", NVRTC_LIBRARY=library, KERNEL_CACHE=cache,
    )["kernels"]  # fmt: skip
    assert found["found"], found
    (file,) = cache.iterdir()
    assert "gfx90a:sramecc+:xnack-" in file.name
    code = file.read_bytes()[64:]
    assert code[:4] == b"\x7fELF"
    assert all(f"{name}.kd\0".encode() in code for name in kernels_of_tests().kernel_names())
    old = report(inside, CUDA_LIBRARY=library, GPU_KERNELS="off")["cuda"]
    assert "has no hipDrvGetErrorString: ROCm 6.0 or newer is needed" in old["reason"]
