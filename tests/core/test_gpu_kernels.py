"""The kernels for GPUs compile: by the real NVRTC through our own loader, and by nvcc as the wheel's build calls it.

No GPU takes part: machine code is made and looked at. It is run nowhere; what the same source computes is tested as PTX
(tests/ptx), and in C++ by the fake of the driver (csrc/tests/gpu/test_gpu_fake_kernels.cc).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from horoclone.arrays.host_memory import dtype_of
from horoclone.runtime.gpu_libraries import nvrtc_folders

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))
from kernels import CAPABILITIES, kernel_names, nvcc

core = pytest.importorskip("horoclone._core", reason="the native module is not built")

ROOT = Path(__file__).resolve().parents[2]

# One rank on the driver's fake, which takes an image for what it is and looks for the kernels' names in it.
COMPILE = """
import ctypes, os, sys
cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
context, stream, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxPushCurrent_v2(context) == 0
assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(64)) == 0
import numpy
numpy.frombuffer((ctypes.c_char * 64).from_address(memory.value), dtype=numpy.int16)[:] = numpy.arange(32)
import horoclone as hvd
from horoclone.runtime import native
hvd.init()
"""


def environment(fakes: Path, cache: Path, capability: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROCLONE_", "HC_"))}
    return {
        **kept,
        "HOROCLONE_CUDA_LIBRARY": str(fakes / "libcuda.so.1"),
        "HOROCLONE_NCCL_LIBRARY": str(fakes / "libnccl.so.2"),
        "HOROCLONE_GPU_OPERATIONS": "auto",
        "HOROCLONE_KERNEL_CACHE": str(cache),
        "HC_FAKE_CAPABILITY": str(capability),
        "HC_FAKE_CUDA_VERSION": "13000",
    }


REDUCE = """
from horoclone import ops
core = native()
for name in ("one", "two"):
    handle = core.submit(ops.ALLREDUCE, name, memory.value, memory.value, (32,), int(sys.argv[1]), ops.Sum, 1.0, 1.0, 0, 0,
                         None, 0, 0, stream.value)
    core.wait(handle)
    core.stream_wait(handle, stream.value)
    assert cuda.cuStreamSynchronize(stream) == 0
print("why no kernels:", hvd.metrics()["gpu"][0]["no_kernels"])
print("launches", cuda.hc_fake_count(b"launches", 0))
hvd.shutdown()
"""


def one_rank(env: dict[str, str]) -> int:
    """Allreduces 16-bit integers, which NCCL does with our kernels' help only; says how many were launched."""
    return int(told_by_one_rank(env).stdout.split("launches")[1])


def told_by_one_rank(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    if json.loads(core.device_report({}))["kernels"].get("where") == "built in":
        env = {**env, "HC_FAKE_CUDA_FAIL": "cuModuleLoadData:1:209"}  # then NVRTC is asked
    command = [sys.executable, "-c", COMPILE + REDUCE, str(dtype_of(np.zeros(1, np.int16)))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_kernels_that_cannot_be_had_are_told_once_and_in_the_metrics(fakes: Path, tmp_path: Path) -> None:
    env = {
        **environment(fakes, tmp_path / "cache", 90),
        "HOROCLONE_NVRTC_LIBRARY": str(fakes / "libnvrtc.so.13"),
        "HC_FAKE_NVRTC_FAIL": "nvrtcCompileProgram:1:6",
    }
    done = told_by_one_rank(env)
    assert "launches 0" in done.stdout, "two allreduces went through host memory"
    assert done.stderr.count("kernels for GPUs cannot be used") == 1, done.stderr
    assert "NVRTC_ERROR_COMPILATION" in done.stderr and "horoclone doctor" in done.stderr
    assert "NVRTC_ERROR_COMPILATION" in done.stdout.partition("why no kernels:")[2]
    healthy = told_by_one_rank({**env, "HC_FAKE_NVRTC_FAIL": ""})
    assert "cannot be used" not in healthy.stderr and "why no kernels: \n" in healthy.stdout


def compiled(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


@pytest.mark.parametrize(
    "capabilities",
    [(CAPABILITIES[1],), pytest.param((CAPABILITIES[0], *CAPABILITIES[2:]), marks=pytest.mark.long(20))],
    ids=["one", "the others"],
)
def test_nvrtc_compiles_the_kernels_for_every_generation_of_gpus(
    fakes: Path, tmp_path: Path, capabilities: tuple[int, ...]
) -> None:
    folders = [f for f in nvrtc_folders() if os.path.exists(os.path.join(f, "libnvrtc.so.13"))]
    if not folders:
        pytest.skip("NVRTC 13 is not installed: pip install nvidia-cuda-nvrtc")

    def check(capability: int) -> None:
        cache = tmp_path / str(capability)
        env = environment(fakes, cache, capability)
        env["HOROCLONE_NVRTC_LIBRARY"] = os.path.join(folders[0], "libnvrtc.so.13")
        assert one_rank(env) == 4, "two allreduces, each packed and unpacked"
        code = compiled(cache).read_bytes()[64:]
        assert f"sm_{capability}-" in compiled(cache).name and code[:4] == b"\x7fELF"
        assert all(f".text.{name}\0".encode() in code for name in kernel_names())

    with ThreadPoolExecutor(2) as two:
        list(two.map(check, capabilities))


def test_what_was_compiled_is_kept_and_a_damaged_or_foreign_file_is_not_used(
    fakes: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "made" / "here"
    env = {**environment(fakes, cache, 90), "HOROCLONE_NVRTC_LIBRARY": str(fakes / "libnvrtc.so.13")}
    assert one_rank(env) == 4
    file = compiled(cache)
    good = file.read_bytes()
    assert (file.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    fails = {**env, "HC_FAKE_NVRTC_FAIL": "nvrtcCompileProgram:1:6"}
    assert one_rank(fails) == 4, "it is not compiled again"
    for spoil in ("damaged", "writable"):
        if spoil == "damaged":
            file.write_bytes(good[:-3] + b"xyz")
        else:
            file.write_bytes(good)
            file.chmod(0o666)
        assert one_rank(fails) == 0, f"{spoil}: then there are no kernels, and host memory reduces"
        assert one_rank(env) == 4 and file.read_bytes() == good, "it is compiled again, and kept"


def parts_of_fatbinary(data: bytes) -> set[tuple[str, int]]:
    """("sm" or "compute", capability) of everything in it."""
    magic, _, head, size = struct.unpack_from("<IHHQ", data)
    assert magic == 0xBA55ED50 and len(data) >= head + size
    found, at = set(), head
    while at < head + size:
        kind, _, entry_head, entry_size = struct.unpack_from("<HHIQ", data, at)
        found.add(("compute" if kind == 1 else "sm", struct.unpack_from("<I", data, at + 28)[0]))
        at += entry_head + entry_size
    return found


@pytest.mark.long(60)
def test_nvcc_builds_the_fat_binary_as_the_wheel_does(tmp_path: Path) -> None:
    compiler, cmake = nvcc(), shutil.which("cmake")
    if compiler is None or cmake is None:
        pytest.skip(
            "no nvcc (pip install --no-deps nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime) or no cmake"
        )
    configure = [cmake, "-S", str(ROOT), "-B", str(tmp_path), f"-DHC_NVCC={compiler}", "-DHC_PYTHON=OFF"]
    subprocess.run(configure, check=True, capture_output=True, timeout=60)
    build = [cmake, "--build", str(tmp_path), "--target", "hc_kernels"]
    done = subprocess.run(build, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = parts_of_fatbinary((tmp_path / "generated" / "kernels.fatbin").read_bytes())
    assert parts == {("sm", capability) for capability in CAPABILITIES} | {("compute", 120)}
