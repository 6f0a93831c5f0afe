"""The environment variables on the Python side: which go to the core, and what is said about the others.

init names every variable that nothing reads, once, on rank 0, with what to do instead. Standard library only.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Unread(NamedTuple):
    """A variable of Horovod's or of older versions that nothing here reads. default: silent at this value; None: never
    mentioned at init."""

    name: str
    default: str | None
    instead: str


_GPU = "Work on GPUs has one stream for each process set, and no thread that waits for it."
_SPARK = "Ranks run beside Spark's tasks with their folder, path and GPUs: horoclone.spark.run(env=...) adds variables."
_BUILD = "Nothing is chosen when horoclone is built: it finds frameworks and launchers when it runs."

UNREAD: tuple[Unread, ...] = (
    Unread("HOROVOD_HIERARCHICAL_ALLGATHER", "0", "allgather has one algorithm here."),
    Unread(
        "HOROVOD_TORUS_ALLREDUCE", "0", "HOROVOD_HIERARCHICAL_ALLREDUCE=1 is the two-level algorithm here."
    ),
    Unread("HOROVOD_NUM_NCCL_STREAMS", "1", _GPU),
    Unread("HOROVOD_BATCH_D2D_MEMCOPIES", "1", _GPU),
    Unread("HOROVOD_ENABLE_ASYNC_COMPLETION", "0", _GPU),
    Unread("HOROVOD_ENABLE_XLA_OPS", "0", _GPU),
    Unread("HOROVOD_DISABLE_NVTX_RANGES", "0", _GPU),
    Unread(
        "HOROVOD_CONTROLLER",
        "gloo",
        "The launcher decides: --mpi or mpirun for MPI, everything else goes without.",
    ),
    Unread(
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
        "1073741824",
        "Adasum needs no MPI here and cuts its messages itself.",
    ),
    Unread("HOROVOD_CCL_CACHE", "0", "oneCCL is not used."),
    Unread(
        "HOROVOD_CCL_BGT_AFFINITY",
        "",
        "oneCCL is not used; HOROVOD_THREAD_AFFINITY places the engine's thread.",
    ),
    Unread(
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        None,
        "Only names the job of ranks that Horovod's own launcher started.",
    ),
    Unread("HOROVOD_GLOO_RENDEZVOUS_PORT", None, "As HOROVOD_GLOO_RENDEZVOUS_ADDR."),
    Unread(
        "HOROVOD_SPARK_START_TIMEOUT", None, "Read in the driver, by horoclone.spark.run; not by the ranks."
    ),
    Unread("HOROCLONE_SPARK_GPUS", None, "Tells a rank which GPUs Spark has assigned to its task."),
    Unread("HOROVOD_SPARK_WORK_DIR", "", _SPARK),
    Unread("HOROVOD_SPARK_PYTHONPATH", "", _SPARK),
    Unread("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "", _SPARK),
    Unread(
        "_HOROVOD_SECRET_KEY", None, "HOROCLONE_SECRET or HOROCLONE_SECRET_FILE gives the ranks a secret."
    ),
    Unread("NCCL_SOCKET_IFNAME", None, "Set by --network-interfaces for other software that uses NCCL."),
    Unread("NCCL_IB_DISABLE", None, "Set by --tcp for other software that uses NCCL."),
    Unread("DDL_OPTIONS", None, "IBM's DDL is not supported."),
    Unread(
        "HOROCLONE_DETERMINISTIC",
        "0",
        "Equal bits on all ranks are always given; between machines group what must be summed in the same order in "
        "every run, or set HOROCLONE_FUSION_THRESHOLD=0.",
    ),
    Unread("HOROCLONE_SHUTDOWN_TIMEOUT_S", "5", "shutdown() waits 5 s for the other ranks."),
    Unread(
        "HOROCLONE_DOORBELL_US",
        "20",
        "HOROCLONE_YIELD_US is the time for which a wait yields before it sleeps.",
    ),
)
# What Horovod reads when it is built. Docker images carry these along, so they are documented and not mentioned.
BUILD_TIME: tuple[str, ...] = (
    *(f"HOROVOD_WITH_{part}" for part in ("PYTORCH", "TENSORFLOW", "MXNET", "MPI", "GLOO", "NVTX")),
    *(f"HOROVOD_WITHOUT_{part}" for part in ("PYTORCH", "TENSORFLOW", "MXNET", "MPI", "GLOO", "NVTX")),
    "HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE", "HOROVOD_GPU_ALLGATHER",
    "HOROVOD_GPU_BROADCAST", "HOROVOD_GPU_ALLTOALL", "HOROVOD_GPU_REDUCESCATTER", "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_CUDA_HOME", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_ROCM_HOME", "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK", "HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_CMAKE",
    "HOROVOD_DEBUG", "HOROVOD_SKIP_COMPILE", "HOROVOD_LOCAL_VERSION",
)  # fmt: skip
BUILD_TIME_INSTEAD = _BUILD

START_TIMEOUT_S = (
    300.0  # the default of the core's table, which the launcher cannot read (tests compare them)
)

_SECRETS = ("HOROCLONE_SECRET", "HOROCLONE_SECRET_FILE")


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """What the core reads: the HOROCLONE_* and HOROVOD_* variables, without the secret."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("HOROCLONE_", "HOROVOD_")) and name not in _SECRETS
    }


def with_own_files(settings: Mapping[str, str], mark: str) -> dict[str, str]:
    """The settings of a runtime that is not the first of its process: a timeline, and autotune's log, have `mark` in
    their names, so that the files of the other stay."""
    own = dict(settings)
    for name in ("TIMELINE", "AUTOTUNE_LOG"):
        for variable in (f"HOROCLONE_{name}", f"HOROVOD_{name}"):
            value = settings.get(variable, "")
            if value and value.upper() != "DYNAMIC":
                stem, ending = os.path.splitext(value)
                own[variable] = f"{stem}.{mark}{ending}"
    return own


def start_timeout_s(environ: Mapping[str, str]) -> float:
    """HOROCLONE_START_TIMEOUT (or HOROVOD_START_TIMEOUT) in seconds."""
    text = setting(environ, "START_TIMEOUT", f"{START_TIMEOUT_S:g}")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{_set(environ, 'START_TIMEOUT')}={text!r} is not a positive number of seconds.")
    return seconds


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """HOROCLONE_<name> or HOROVOD_<name>, a number of seconds from 0. ValueError for anything else."""
    text = setting(environ, name, f"{default:g}")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ValueError(f"{_set(environ, name)}={text!r} is not a number of seconds.")
    return value


def setting(environ: Mapping[str, str], name: str, default: str) -> str:
    """HOROCLONE_<name> or HOROVOD_<name>, without case or blanks around; `default` when unset or empty."""
    return (environ.get(_set(environ, name)) or default).strip().lower()


def _set(environ: Mapping[str, str], name: str) -> str:
    """The variable that counts: HOROCLONE_<name>, or HOROVOD_<name> where that alone is set."""
    own, horovods = f"HOROCLONE_{name}", f"HOROVOD_{name}"
    return horovods if environ.get(horovods) and not environ.get(own) else own


def check(environ: Mapping[str, str]) -> None:
    """Of what the core does not read itself; init() calls it, so that every rank hears of a bad value."""
    comparison(environ)
    notice_signal(environ)
    for name in ("NOTICE", "ELASTIC_TIMEOUT", "REPLICA_INTERVAL"):
        seconds(environ, name, 0.0)


def notice_signal(environ: Mapping[str, str]) -> signal.Signals | None:
    """HOROCLONE_NOTICE_SIGNAL, if any. ValueError for another one than USR1 or USR2."""
    name = setting(environ, "NOTICE_SIGNAL", "").removeprefix("sig")
    if name not in ("", "usr1", "usr2"):
        raise ValueError(f"HOROCLONE_NOTICE_SIGNAL={name.upper()!r} must be USR1 or USR2.")
    return signal.Signals[f"SIG{name.upper()}"] if name else None


COMPARE = ("warn", "repair", "error", "off")


def comparison(environ: Mapping[str, str]) -> tuple[int, int]:
    """HOROCLONE_COMPARE by its place in COMPARE, and HOROCLONE_COMPARE_STEPS. ValueError for what they cannot be."""
    action, steps = setting(environ, "COMPARE", "warn"), setting(environ, "COMPARE_STEPS", "100")
    if action not in COMPARE:
        raise ValueError(f"HOROCLONE_COMPARE={action!r} must be one of {', '.join(COMPARE)}.")
    if not steps.isascii() or not steps.isdigit() or len(steps) > 9:
        raise ValueError(f"HOROCLONE_COMPARE_STEPS={steps!r} must be a number of steps, 0 or more.")
    return COMPARE.index(action), int(steps)


def core_defaults() -> dict[str, str]:
    """Defaults of the core's settings, by Horovod's variable; empty where the core cannot be loaded."""
    try:
        from horoclone import _core
    except ImportError:
        return {}
    return {row["horovod"]: row["default"] for row in json.loads(_core.knobs())}


def flag(environ: Mapping[str, str], name: str, default: str = "0") -> bool:
    """The setting is neither 0, false, no nor off."""
    return setting(environ, name, default) not in ("0", "false", "no", "off")


def remarks(environ: Mapping[str, str], knobs: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each variable that is set and has no effect: no part of horoclone reads it, or it is misspelt.
    knobs: the rows of _core.knobs(). Empty at LOG_LEVEL error or fatal.
    """
    level = environ.get("HOROCLONE_LOG_LEVEL") or environ.get("HOROVOD_LOG_LEVEL") or ""
    if level.strip().lower() in ("error", "fatal"):
        return []
    known = {name for knob in knobs for name in (knob["name"], knob["horovod"]) if name}
    lines = [
        f"{name}={environ[name]} has no effect, nothing reads it: {instead}"
        for name, default, instead in UNREAD
        if name not in known and default is not None and environ.get(name, "").strip() not in ("", default)
    ]
    return lines + _misspelt(environ, known)


def _misspelt(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """HOROCLONE_ names that are no setting, and HOROVOD_ names that are nearly one (other software has such names)."""
    valid = {*known, *BUILD_TIME, *(one.name for one in UNREAD)}
    lines = []
    for name in sorted(environ):
        if not name.startswith(("HOROCLONE_", "HOROVOD_")) or name in valid:
            continue
        near = difflib.get_close_matches(name, valid, 1, 0.9)
        if near or name.startswith("HOROCLONE_"):
            meant = f"; did you mean {near[0]}?" if near else "; docs/environment.md has the list."
            lines.append(f"{name} is not a setting{meant}")
    return lines
