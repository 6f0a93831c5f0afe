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
    """Returns the version code (22809 is 2.28.9) of NCCL, or of RCCL, 0 when it or the driver does not load: `horoclone
    doctor` says why."""
    import ctypes
    import os

    from horoclone.runtime.gpu_libraries import nccl_folders

    if cuda_built():
        files = ["libnccl.so.2", *(f"{folder}/libnccl.so.2" for folder in nccl_folders())]
    elif rocm_built():
        files = ["librccl.so", "librccl.so.1"]
    else:
        return 0
    for file in [os.environ.get("HOROCLONE_NCCL_LIBRARY") or files[0], *files[1:]]:
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
    return _loads(("libcuda.so.1",), "cuInit") and not _loads((), "hipInit")


def rocm_built() -> bool:
    """Returns whether HIP is here, and no driver of CUDA's."""
    return not cuda_built() and _loads(("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"), "hipInit")


def _loads(files: tuple[str, ...], function: str) -> bool:
    """Whether the file that is set, or one of these, loads and has the function."""
    import ctypes
    import os

    named = os.environ.get("HOROCLONE_CUDA_LIBRARY")
    for file in (named,) if named else files:
        try:
            if hasattr(ctypes.CDLL(file), function):
                return True
        except OSError:
            continue
    return False
