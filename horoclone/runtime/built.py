"""What this build can do here, under the names by which Horovod's scripts ask. No state; no GPU is started."""

from __future__ import annotations


def mpi_built() -> bool:
    """Returns whether mpi4py is installed: communicators can be passed to init, and data can go through MPI between
    nodes."""
    import importlib.util

    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Returns True always: MPI is not needed."""
    return True


def nccl_built() -> int:
    """Returns NCCL's version code (22809 is 2.28.9), 0 when it or CUDA's driver does not load: `horoclone doctor` says
    why."""
    import ctypes
    import os

    from horoclone.runtime.gpu_libraries import nccl_folders

    if not cuda_built():
        return 0
    files = [f"{folder}/libnccl.so.2" for folder in nccl_folders()]
    for file in [os.environ.get("HOROCLONE_NCCL_LIBRARY") or "libnccl.so.2", *files]:
        version = ctypes.c_int(0)
        try:
            if ctypes.CDLL(file).ncclGetVersion(ctypes.byref(version)) == 0:
                return version.value
        except (OSError, AttributeError):
            continue
    return 0


def ddl_built() -> bool:
    """Returns False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Returns False: oneCCL is not supported."""
    return False


def sycl_built() -> bool:
    """Returns False: SYCL is not supported."""
    return False


def cuda_built() -> bool:
    """Returns whether CUDA's driver is here; torch.cuda.is_available() says whether a GPU is."""
    import ctypes
    import os

    try:
        ctypes.CDLL(os.environ.get("HOROCLONE_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError:
        return False
    return True


def rocm_built() -> bool:
    """Returns False: ROCm is not supported."""
    return False
