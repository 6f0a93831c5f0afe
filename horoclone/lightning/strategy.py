"""HorocloneStrategy: Lightning's DDP strategy on the c10d backend `horoclone`.

DDP rather than DistributedOptimizer, because Lightning clips, accumulates and toggles optimizers inside the closure of
optimizer.step(), and knows how DDP wants that; torchmetrics and log(sync_dist=True) need a process group anyway.
Thread: the one that trains.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import horoclone.torch  # noqa: F401 - registers the backend
from horoclone import runtime
from horoclone.errors import Unsupported
from horoclone.lightning.environment import HorocloneEnvironment, check_options

NAME = "horoclone"


class HorocloneStrategy(DDPStrategy):
    """Trains on all ranks that the launcher has started, CPU tensors, one device per rank.

    Takes DDPStrategy's arguments for DDP (find_unused_parameters, gradient_as_bucket_view, static_graph,
    bucket_cap_mb, ...), and ddp_comm_hook with ddp_comm_state, which here works on the CPU. Trainer's `devices` and
    `num_nodes` may be left out; ValueError where they differ from what was started. Unsupported for other devices.
    """

    strategy_name = NAME
    _asked: bool  # the trainer has set its devices

    def __init__(
        self,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: Any = None,
        cluster_environment: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_state=ddp_comm_state,
            cluster_environment=cluster_environment or HorocloneEnvironment(),
            process_group_backend=NAME,
            **kwargs,
        )

    # --- who and where -----------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if accelerator is not None and not isinstance(accelerator, CPUAccelerator):
            raise Unsupported(
                f"HorocloneStrategy trains on CPUs, not with {type(accelerator).__name__}: pass "
                "Trainer(accelerator='cpu'), or use Lightning's strategy 'ddp' for other devices."
            )
        self._accelerator = accelerator

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Returns one device for each rank on this host; None until the trainer has said what it was asked for."""
        return [torch.device("cpu")] * runtime.local_size() if self._asked else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._asked = bool(devices)
        if devices:
            check_options(len(devices), 1)

    @property
    def num_nodes(self) -> int:
        return runtime.cross_size()

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        check_options(1, count)

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # --- starting ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        self._launcher = None  # the ranks are there

    def setup_distributed(self) -> None:
        """Joins the process group, or takes the one that is there. RuntimeError if that is of another backend."""
        reset_seed()
        self.set_world_ranks()
        if dist.is_initialized():
            if dist.get_backend() != NAME:
                raise RuntimeError(
                    f"torch.distributed was initialised with the backend {dist.get_backend()!r} before, and "
                    f"HorocloneStrategy needs {NAME!r}: initialise it with that one, or leave it to the strategy"
                )
            return
        dist.init_process_group(NAME, timeout=self._timeout)
        atexit.register(_leave)

    def _register_ddp_hooks(self) -> None:
        """Lightning's own registers them for GPUs only."""
        if self._ddp_comm_hook is not None:
            hook = self._ddp_comm_hook
            if self._ddp_comm_wrapper is not None:
                hook = self._ddp_comm_wrapper(hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            NAME, cls, description="DDP on horoclone's transports, for ranks that a launcher made"
        )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


if NAME not in StrategyRegistry:
    HorocloneStrategy.register_strategies(StrategyRegistry)
