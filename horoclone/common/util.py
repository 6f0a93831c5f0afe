"""Under Horovod's name: small functions that scripts take from `horovod.common.util`. Loads no framework.

The *_built functions answer for this build, as those of horoclone.runtime.built do.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from horoclone.runtime import built

T = TypeVar("T")

_cache = functools.cache


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for the block, then puts the old state back. None leaves a variable alone."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    try:
        os.environ.update(wanted)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether `horoclone.<ext_base_name>` exists and its framework is installed. Loads neither."""
    try:
        names = (f"horoclone.{ext_base_name}", ext_base_name)
        there = all(importlib.util.find_spec(name) is not None for name in names)
    except (ImportError, ValueError):
        there = False
    if verbose:
        print(f"horoclone: the extension {ext_base_name} is {'there' if there else 'not there'}")
    return there


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether that framework's GPU tensors can be reduced by this build."""
    return extension_available(ext_base_name, verbose) and (built.cuda_built() or built.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    """Whether jobs may be started by mpirun: mpi4py is installed."""
    return built.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Always True: it means that MPI is not needed."""
    return built.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version code, 0 when NCCL cannot be used."""
    return built.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """False: IBM's DDL is not supported."""
    return built.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """False: oneCCL is not supported."""
    return built.ccl_built()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raises ImportError when the binding ext_name ("horovod.torch") is not there. The rest is not needed."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} cannot be used: horoclone has no binding for {framework}, or {framework} is not installed. "
            f"Nothing is chosen when horoclone is built, so {ext_env_var} has no effect; install {framework}."
        )


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Returns: no part of horoclone is compiled against one version of a framework, so none can be the wrong one."""


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether version `ver` is `target` ("major.minor.patch") or later; 2.1.0rc1 and 2.1.0.dev3 come before
    2.1.0.

    Raises ValueError for arguments that are no such strings.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"is_version_greater_equal_than takes two strings, not {ver!r} and {target!r}.")
    wanted = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", target)
    found = re.match(r"v?(\d+(?:\.\d+)*)[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)?\d*", ver.strip().lower())
    if wanted is None:
        raise ValueError(f"target={target!r} is not of the form major.minor.patch.")
    if found is None:
        raise ValueError(f"ver={ver!r} is not a version.")
    release = [int(number) for number in found.group(1).split(".")]
    floor = [int(number) for number in wanted.groups()]
    length = max(len(release), len(floor))
    release += [0] * (length - len(release))
    floor += [0] * (length - len(floor))
    return release > floor or (release == floor and found.group(2) is None)


def split_list(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cuts a sequence into `parts` consecutive pieces whose lengths differ by at most one, the longer ones first."""
    short, longer = divmod(len(values), parts)
    ends = [short * part + min(part, longer) for part in range(parts + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two (1 is)."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    """Whether `iter(value)` works."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def get_ext_suffix() -> str:
    """How the file names of this Python's extension modules end."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")
