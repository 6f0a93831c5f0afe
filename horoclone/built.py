"""What this build can do, under the names at which Horovod's scripts ask for it. No state, nothing is loaded."""

from __future__ import annotations


def mpi_built() -> bool:
    """Whether mpi4py is installed: jobs may be started by mpirun and communicators passed to init."""
    import importlib.util

    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Always True: it means that MPI is not needed."""
    return True


def nccl_built() -> int:
    """NCCL's version code, 0 when NCCL cannot be used."""
    return 0


def ddl_built() -> bool:
    """False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Whether tensors on CUDA devices can be reduced there."""
    return False


def rocm_built() -> bool:
    """False: ROCm is not supported."""
    return False
