"""oneCCL as a contestant: its interface is C++, so a few C functions around it are compiled when a benchmark starts.

It needs Intel MPI's mpirun, through which its transport goes, and a prefix `oneccl` beside this Python (INSTALL).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from session import Failed

if TYPE_CHECKING:
    import torch

SHIM = Path(__file__).resolve().parent / "oneccl_shim.cc"
PREFIX = Path(sys.executable).parent.parent / "oneccl"
# In this order: the package for processors replaces libccl.so.1 of the first, which needs SYCL, and lacks libccl.so.2.
INSTALL = " && ".join(
    f"pip install --ignore-installed --no-deps --prefix {PREFIX} {packages}"
    for packages in ("oneccl oneccl-devel", "oneccl-cpu")
)


def why_absent() -> str:
    """What is missing for oneCCL on this machine; empty when nothing is."""
    for file in ("include/oneapi/ccl.hpp", "lib/libccl.so.1", "lib/libccl.so.2"):
        if not (PREFIX / file).exists():
            return f"no oneCCL: {PREFIX / file} is missing; {INSTALL}"
    return "" if shutil.which("g++") else "no oneCCL: g++ is missing, its interface is C++"


def compile_shim(folder: str) -> Path:
    """Builds oneccl_shim.cc against the prefix. Failed with the compiler's words."""
    if absent := why_absent():
        raise Failed(absent)
    library = Path(folder) / "oneccl_shim.so"
    libraries = PREFIX / "lib"
    built = subprocess.run(
        ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{PREFIX / 'include'}", str(SHIM), "-o", str(library),
         f"-L{libraries}", "-l:libccl.so.1", f"-Wl,-rpath,{libraries}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if built.returncode:
        raise Failed(f"oneCCL's functions cannot be compiled: {built.stderr[-2000:]}")
    return library


class OneCcl:
    """`ccl::allreduce(...).wait()` in place. Each rank works in the calling thread, as the other contestants do."""

    def __init__(self, comm: Any) -> None:
        os.environ.setdefault("CCL_ATL_TRANSPORT", "mpi")  # which finds the MPI that mpi4py has loaded
        os.environ.setdefault("CCL_WORKER_OFFLOAD", "0")
        with tempfile.TemporaryDirectory() as folder:
            path = comm.bcast(str(compile_shim(folder)) if comm.rank == 0 else None)
            self._library = ctypes.CDLL(path)
            comm.Barrier()  # all have loaded it: the folder may go
        for told in (self._library.shim_error, self._library.shim_version):
            told.restype = ctypes.c_char_p
        self.label = f"oneCCL {self._library.shim_version().decode()}"
        address = ctypes.create_string_buffer(self._library.shim_address_bytes())
        if comm.rank == 0:
            self._check(self._library.shim_address(address))
        address = ctypes.create_string_buffer(comm.bcast(address.raw), len(address))
        self._check(self._library.shim_connect(address, comm.rank, comm.size))

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"oneCCL: {self._library.shim_error().decode()}")

    def prepare(self, tensor: torch.Tensor, _: torch.Tensor, name: str) -> Callable[[], object]:
        reduce, check = self._library.shim_sum, self._check
        address, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        return lambda: check(reduce(address, count))

    def close(self) -> None:
        self._check(self._library.shim_close())
