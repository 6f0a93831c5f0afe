"""Finds out which launcher started this process, and as which rank, from the environment variables alone.

The first that applies wins: own launcher, torchrun (or its env:// variables), Open MPI, Hydra (MPICH, Intel MPI), a
Slurm step, other MPI launchers, a service (pods of Kubernetes), Horovod's variables, a process alone. A launcher of N
processes is never ignored.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from horoclone import errors
from horoclone.bootstrap import client, pmix, service, wire

Environment = Mapping[str, str]

# Step ids from here on are Slurm's own (batch script, extern, interactive): no task of srun.
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Placement:
    """What the launcher says. local_rank and local_size are -1 and size is 0 where it does not say."""

    launcher: str  # horoclone, torchrun, env://, openmpi, pmix, hydra, slurm, mpi, service, horovod, single
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str  # the launcher's own name for this run, the same in all its processes; may be empty
    why: str

    @property
    def uses_mpi(self) -> bool:
        """Started by something that MPI programs are started with."""
        return self.launcher in ("openmpi", "pmix", "hydra", "mpi")

    @property
    def one_host(self) -> bool:
        """Whether the launcher says that all processes are on this host."""
        return self.size == 1 or (self.size > 1 and self.local_size == self.size)


# Launchers whose variables we can read, though not their key-value stores: (name, rank, size, local rank, local size).
OTHER_MPI = (
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    ("PALS", "PALS_RANKID", "PALS_NUM_RANKS", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)


def detect(environ: Environment) -> Placement:
    """The placement that init() will use.

    Raises Unsupported when variables contradict each other or when the launcher of N processes would be taken for one.
    """
    found = candidates(environ)
    chosen = found[0]
    if chosen.size == 1 and chosen.launcher in ("env://", "horovod"):
        # Variables that anybody may have exported, against a launcher that has really started several processes.
        for other in found[1:]:
            if other.size > 1:
                raise errors.Unsupported(
                    f"{other.why}, but {chosen.why}. {other.size} processes would each run alone. Unset the variables "
                    f"of {chosen.launcher} or set them to the rank and size of every process."
                )
    return chosen


# Who says how many processes there are; and without what that is of no use.
NEEDED = {
    "WORLD_SIZE": ("RANK", "MASTER_ADDR", "MASTER_PORT"),
    "PMI_SIZE": ("PMI_RANK", "PMI_FD"),
    "HOROVOD_SIZE": ("HOROVOD_RANK",),
    "HOROCLONE_SIZE": ("HOROCLONE_RENDEZVOUS", "HOROCLONE_RANK"),
}


def refuse_some_of_several(environ: Environment) -> None:
    """Unsupported where no launcher was found, though some of its variables say that this is one of several processes:
    it would run alone. WORLD_SIZE by itself, as a shell may export it for what it starts, says nothing."""
    for name, needed in NEEDED.items():
        size = environ.get(name, "").strip()
        missing = [one for one in needed if one not in environ]
        if name == "WORLD_SIZE" and environ.get(BESIDE_OURS) == mark_of_torchs(environ):
            continue
        if name == "WORLD_SIZE" and "RANK" not in environ and "LOCAL_RANK" not in environ:
            continue
        if size.isdigit() and int(size) > 1 and missing:
            raise errors.Unsupported(
                f"{name}={size} says that there are {size} processes, but {' and '.join(missing)} "
                f"{'are' if len(missing) > 1 else 'is'} not set: each would run alone. Unset {name} if this one is "
                "alone. Else set what is missing in every process, as its launcher does, or import mpi4py before "
                "hvd.init(), or start the job with horoclonerun."
            )


def candidates(environ: Environment) -> list[Placement]:
    """Every launcher that the environment shows, in order of precedence; `single` is always the last."""
    rules: list[Callable[[Environment], Placement | None]] = [
        _own, _torchrun, _openmpi, _hydra, _slurm, _pmix, _other_mpi, _service, _horovod
    ]  # fmt: skip
    found = [placement for rule in rules if (placement := rule(environ)) is not None]
    return [*found, Placement("single", 0, 1, 0, 1, "", "no launcher's variables are set")]


def explain(environ: Environment) -> str:
    """Several lines for humans: what was decided, why, how the ranks will find each other, and what else was seen."""
    lines = []
    try:
        chosen = detect(environ)
        if chosen.launcher == "single":
            refuse_some_of_several(environ)
    except (errors.HorovodInternalError, ValueError) as error:
        return f"launcher: cannot be used\n  {error}"
    if chosen.size == 0:
        lines.append(f"launcher: {chosen.launcher} (rank {chosen.rank}, it does not say of how many)")
    else:
        lines.append(f"launcher: {chosen.launcher} (rank {chosen.rank} of {chosen.size})")
    lines.append(f"  because {chosen.why}")
    if chosen.size > 1:
        hosts = "one host" if chosen.one_host else "several hosts, or the launcher does not say"
        lines.append(f"  placement: {hosts} (local rank {chosen.local_rank}, local size {chosen.local_size})")
    if chosen.launcher == "openmpi" and not chosen.one_host:
        lines.append(f"  first contact: {pmix.explain(environ)}")
    for other in candidates(environ)[1:-1]:
        lines.append(
            f"  also seen, not used: {other.launcher}, rank {other.rank} of {other.size}: {other.why}"
        )
    return "\n".join(lines)


def torch_port(job: str) -> int:
    """MASTER_PORT of a job of horoclonerun; below the ephemeral range, where no connection takes it by chance."""
    return 20000 + zlib.crc32(job.encode()) % 12000


# Not named after us: it must stay where a process is started without our variables, to be a job of its own.
BESIDE_OURS = "_TORCH_VARIABLES_BESIDE_OTHERS"


def mark_of_torchs(environ: Environment) -> str:
    """What BESIDE_OURS holds while torch's variables are those that horoclonerun has set."""
    return "/".join(environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


def torchs_by_us(environ: Environment) -> bool:
    """Whether torch's variables are those that horoclonerun sets beside its own: nobody serves there yet."""
    job = environ.get("HOROCLONE_JOB")
    return bool(job) and environ.get("MASTER_PORT") == str(torch_port(job or ""))


def _own(environ: Environment) -> Placement | None:
    address = environ.get("HOROCLONE_RENDEZVOUS")
    if not address:
        return None
    names = {
        part: f"HOROCLONE_{part}" if f"HOROCLONE_{part}" in environ else f"HOROVOD_{part}"
        for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    }
    why = f"HOROCLONE_RENDEZVOUS is set ({address}), by horoclonerun"
    job = environ.get("HOROCLONE_JOB", "")
    return _placement(environ, "horoclone", tuple(names.values()), job, why, required=True)


def _torchrun(environ: Environment) -> Placement | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elastic = "TORCHELASTIC_RUN_ID" in environ
    if not elastic and not ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        return None
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    if not elastic and environ.get(BESIDE_OURS) == mark_of_torchs(environ):
        return None
    parts = [environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    job = ":".join(["torchrun" if elastic else "env", *parts])
    launcher = "torchrun" if elastic else "env://"
    mark = "TORCHELASTIC_RUN_ID" if elastic else "MASTER_ADDR"
    why = f"{mark}, RANK and WORLD_SIZE are set (torchrun, env://)"
    found = _placement(environ, launcher, names, job, why)
    if found.one_host:  # of one agent; those of several do not count the lives of a job alike
        found = replace(found, job=f"{job}:{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    if not elastic and found.local_size < 0 and _is_this_host(environ):  # reached from this host alone
        return replace(found, local_rank=found.rank, local_size=found.size)
    return found


def _is_this_host(environ: Environment) -> bool:
    """Whether MASTER_ADDR can be reached from this host alone. In pods it is often `localhost` in the first only."""
    address = environ.get("MASTER_ADDR", "")
    is_loopback = address == "localhost" or wire.is_loopback(address)
    return is_loopback and "KUBERNETES_SERVICE_HOST" not in environ


def _openmpi(environ: Environment) -> Placement | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    names = tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return _placement(environ, "openmpi", names, job, "OMPI_COMM_WORLD_* is set, by Open MPI's mpirun")


def _hydra(environ: Environment) -> Placement | None:
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    if (
        environ.get("SLURM_PROCID") == environ["PMI_RANK"]
        and "MPI_LOCALNRANKS" not in environ
        and _slurm(environ)
    ):
        return None  # srun --mpi=pmi2 sets these too; the step's own variables say more
    if not any(name in environ for name in ("PMI_FD", "PMI_PORT", "HYDI_CONTROL_FD", "MPI_LOCALNRANKS")):
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _placement(
        environ, "hydra", names, "", "PMI_RANK and PMI_SIZE are set, by Hydra (MPICH, Intel MPI)"
    )


def _slurm(environ: Environment) -> Placement | None:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= SLURM_FIRST_SPECIAL_STEP:
        return None  # an sbatch or salloc shell: one process, whatever SLURM_NTASKS says
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    filled = dict(environ)
    here = _tasks_on_node(environ)
    if here is not None:
        filled["SLURM_STEP_LOCAL_TASKS"] = str(here)
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_LOCAL_TASKS")
    job = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", ""))
    job = f"slurm:{job}:{step}:{environ.get('SLURM_RESTART_COUNT', '0')}"
    return _placement(filled, "slurm", names, job, "SLURM_STEP_ID and SLURM_PROCID are set, by srun")


def _tasks_on_node(environ: Environment) -> int | None:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE, e.g. `2(x3),1`."""
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return _whole(environ, "SLURM_STEP_NUM_TASKS")
    node = environ.get("SLURM_NODEID", "")
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        times = times.rstrip(")") or "1"
        if not count.isdigit() or not times.isdigit() or int(times) > 1_000_000:
            return None
        counts += [int(count)] * int(times)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _pmix(environ: Environment) -> Placement | None:
    if "PMIX_RANK" not in environ or "PMIX_NAMESPACE" not in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return None
    rank = _whole(environ, "PMIX_RANK")
    why = "PMIX_RANK and PMIX_NAMESPACE are set, by a PMIx launcher"
    return Placement("pmix", rank, 0, -1, -1, environ["PMIX_NAMESPACE"], why)


def _other_mpi(environ: Environment) -> Placement | None:
    for name, *names in OTHER_MPI:
        if names[0] in environ and names[1] in environ:
            return _placement(environ, "mpi", tuple(names), "", f"{names[0]} is set, by {name}")
    return None


def _service(environ: Environment) -> Placement | None:
    """Processes that nobody of ours has started: each knows its number and the name behind which all of them are."""
    if not service.is_set(environ):
        return None
    place = service.place_of(environ)
    return Placement("service", place.index, place.size, -1, -1, place.job, service.why(place))


def _horovod(environ: Environment) -> Placement | None:
    if "HOROVOD_RANK" not in environ or "HOROVOD_SIZE" not in environ:
        return None
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    gloo = [environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")]
    job = environ.get("HOROCLONE_JOB") or (":".join(["horovod", *gloo]) if all(gloo) else "")
    why = "HOROVOD_RANK and HOROVOD_SIZE are set, by Horovod's launcher or by hand"
    return _placement(environ, "horovod", names, job, why)


def _placement(
    environ: Environment, launcher: str, names: tuple[str, ...], job: str, why: str, required: bool = False
) -> Placement:
    """Reads rank, size, local rank, local size under these names; the last two may be absent."""
    for name in names[:2]:
        if name not in environ:
            raise errors.Unsupported(
                f"{why}, but {name} is not; the launcher's environment did not arrive whole. {client.LEFT_OVER}"
            )
    rank, size = _whole(environ, names[0]), _whole(environ, names[1])
    local_rank, local_size = (_whole(environ, name) if name in environ else -1 for name in names[2:4])
    if not 0 <= rank < size:
        raise errors.Unsupported(
            f"{names[0]}={rank} is not below {names[1]}={size}; are they left from another job?"
        )
    if local_size > size or (local_size >= 0 and local_rank >= local_size):
        raise errors.Unsupported(
            f"{names[2]}={local_rank}, {names[3]}={local_size} do not fit {names[1]}={size}; are they left from "
            "another job?"
        )
    return Placement(launcher, rank, size, local_rank, local_size, job, why)


def _whole(environ: Environment, name: str) -> int:
    text = environ[name]
    if not text.strip().isdigit() or len(text) > 10:
        raise errors.Unsupported(
            f"{name}={text!r} is not a whole number; unset it or start the process anew."
        )
    return int(text)
