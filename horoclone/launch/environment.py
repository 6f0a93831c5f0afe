"""Makes the environment of a rank, and says which of our variables travel to other hosts. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from horoclone.bootstrap.detect import BESIDE_OURS, mark_of_torchs, torch_port
from horoclone.launch.hosts import Placement

# Of the other host, or of our terminal: they would be wrong there.
_STAYS_HERE = re.compile(
    r"^(BASH_FUNC_.*|BASHOPTS|SHELLOPTS|OLDPWD|PWD|SHLVL|_|HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|HOST|TERM|TTY|DISPLAY"
    r"|XAUTHORITY|WINDOWID|SSH_.*|XDG_.*|DBUS_.*|GPG_.*|TMUX.*|STY|LS_COLORS|HOROCLONE_SECRET.*|HOROCLONE_RANK_METRICS|_HOROVOD_SECRET_KEY)$"
)
# What another launcher told *us* about this process would contradict the rank's own numbers.
_STALE = (
    "HOROCLONE_FUNCTION_FDS", "HOROCLONE_RANK_METRICS", "HOROCLONE_FUNCTION_FOLDER", "HOROCLONE_SECRET_FD",
    "HOROCLONE_SECRET", "HOROCLONE_SECRET_FILE", "HOROCLONE_MEMBER", "HOROCLONE_ELASTIC", "HOROVOD_ELASTIC",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "TORCHELASTIC_ERROR_FILE", BESIDE_OURS,
)  # fmt: skip
# With one of these, the address and port for torch are that launcher's, and maybe in use, not the user's.
_OF_A_RANK = ("RANK", "TORCHELASTIC_RUN_ID", "HOROCLONE_JOB")


def rank_variables(placement: Placement, rendezvous: str, job: str) -> dict[str, str]:
    """The variables that differ from rank to rank, under both names."""
    variables = {"HOROCLONE_RENDEZVOUS": rendezvous, "HOROCLONE_JOB": job}
    for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        value = str(getattr(placement, name))
        variables[f"HOROCLONE_{name.upper()}"] = value
        variables[f"HOROVOD_{name.upper()}"] = value
    variables["HOROVOD_HOSTNAME"] = variables["HOROCLONE_HOSTNAME"] = placement.host.rpartition("@")[2]
    return variables


def torch_variables(
    placement: Placement, node: int, first_host: str, job: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """torchrun's, so that scripts written for it run, init_process_group("gloo") too. node: the number of its host. An
    address or port that the user has set stays. Not for elastic jobs, where the numbers change while a process lives.
    """
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "GROUP_RANK": str(node),
    }
    store = {"MASTER_ADDR": first_host, "MASTER_PORT": str(torch_port(job))}
    variables |= {name: environment.get(name) or value for name, value in store.items()}
    return {**variables, BESIDE_OURS: mark_of_torchs(variables)}


def member_variables(rendezvous: str, id_: bytes, timeout_s: float) -> dict[str, str]:
    """What makes a process a worker of an elastic job."""
    address, _, port = rendezvous.partition(",")[0].rpartition(":")
    return {
        "HOROCLONE_MEMBER": id_.hex(),
        "HOROCLONE_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "HOROCLONE_ELASTIC_TIMEOUT": f"{timeout_s:g}",
        "HOROVOD_ELASTIC_TIMEOUT": f"{timeout_s:g}",
        "HOROVOD_CONTROLLER": "gloo",  # this and the next two for scripts that look, nothing here reads them
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }


def job_environment(ours: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Our environment with the settings of flags and file in it; HOROCLONE_X is kept equal to HOROVOD_X where both
    exist, because the first name wins."""
    is_rank = any(name in ours for name in _OF_A_RANK)
    stale = (*_STALE, "MASTER_ADDR", "MASTER_PORT") if is_rank else _STALE
    environment = {name: value for name, value in ours.items() if name not in stale}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # otherwise output through our pipes comes 8 KiB late
    for name, value in settings.items():
        environment[name] = value
        twin = name.replace("HOROVOD_", "HOROCLONE_", 1)
        if twin in environment:
            environment[twin] = value
    return environment


def variables_of_caller(env: Mapping[str, str] | None) -> dict[str, str]:
    """What a Python program wants to be set for the ranks. ValueError for what cannot be a variable."""
    for name, value in (env or {}).items():
        is_text = isinstance(name, str) and isinstance(value, str)
        if not is_text or not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env: a variable has a name and a value that are text, not {name!r}: {value!r}")
    return dict(env or {})


def thread_variables(
    environment: Mapping[str, str], threads: str, local_size: int, cores: int
) -> dict[str, str]:
    """OMP_NUM_THREADS so that the ranks of one host share its cores. threads: 'auto', 'off' or a number."""
    if threads == "off" or (threads == "auto" and ("OMP_NUM_THREADS" in environment or local_size < 2)):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // local_size)) if threads == "auto" else threads}


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that travel to other hosts: all but those of this host or of a terminal."""
    return {name: value for name, value in environment.items() if not _STAYS_HERE.match(name)}
