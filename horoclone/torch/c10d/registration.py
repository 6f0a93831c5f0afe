"""Makes the backend known to torch.distributed; importing horoclone.torch.c10d does it.

Thread: the one that imports, then the one that makes groups.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import atexit
import functools
import os
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horoclone.torch.c10d.group import HorocloneGroup, open_groups
from horoclone.torch.c10d.group_properties import BACKEND
from horoclone.torch.c10d.rendezvous import install_rendezvous
from horoclone.torch.c10d.work import registered_builtin_hooks


def _create(facts: Any, _options: Any) -> HorocloneGroup:
    return HorocloneGroup(
        facts.store, facts.group_rank, facts.group_size, facts.timeout, facts.global_ranks_in_group
    )


def _close_all() -> None:
    for group in list(open_groups):
        group.shutdown()


def _after_fork_in_child() -> None:
    for group in list(open_groups):
        if group._runtime is not None:
            group._runtime.after_fork_child()


def _keep_torchs_recorder_off() -> None:
    """Torch 2.15 hangs its flight recorder on groups whose backend is not known to record itself, which fails where no
    backend in C++ is registered. The core keeps a record of its own."""
    recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(recording, set):
        recording.add(BACKEND)


def _hear_of_builtin_hooks() -> None:
    """Works do otherwise for FP16_COMPRESS (Work.get_future), which asks them as DDP does without a hook."""
    register_hook = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(register_hook)
    def hear(model: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        register_hook(model, comm_hook_type)
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            registered_builtin_hooks.add(comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = hear  # type: ignore[method-assign]


def register() -> None:
    """Registers the backend "horoclone" with torch.distributed; more calls do nothing."""
    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    _keep_torchs_recorder_off()
    _hear_of_builtin_hooks()
    install_rendezvous()
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_after_fork_in_child)
