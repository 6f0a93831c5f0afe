"""Under Horovod's name: `horovod.runner.run` is horoclone.run, and the modules below are those that scripts import.

What lies here is thin: the work is done in horoclone.launch. Importing this package loads neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horoclone.launch.api import run as run

__all__ = ["run"]


class _HorovodArgs:
    """What one start is asked for, by the names of horovodrun's flags; for runner.launch._run()."""

    def __init__(self) -> None:
        self.num_proc: int | str | None = 1
        self.run_func: Any = None
        self.command: list[str] | None = None
        self.executable: str | None = None
        self.check_build = self.disable_cache = self.verbose = None
        self.hosts = self.hostfile = self.host_discovery_script = None
        self.ssh_port = self.ssh_identity_file = self.start_timeout = self.output_filename = None
        self.config_file = self.nic = self.nics = None
        self.use_gloo = self.use_mpi = self.use_jsrun = None
        self.mpi_args = self.tcp_flag = self.binding_args = None
        self.prefix_output_with_timestamp = None
        self.min_num_proc = self.max_num_proc = self.slots = None
        self.elastic_timeout = self.reset_limit = self.cooldown_range = None
        self.fusion_threshold_mb = self.cycle_time_ms = self.cache_capacity = None
        self.hierarchical_allreduce = self.hierarchical_allgather = self.torus_allreduce = None
        self.autotune = self.autotune_log_file = None
        self.autotune_warmup_samples = self.autotune_steps_per_sample = None
        self.autotune_bayes_opt_max_samples = self.autotune_gaussian_process_noise = None
        self.timeline_filename = self.timeline_mark_cycles = None
        self.no_stall_check = None
        self.stall_check_warning_time_seconds = self.stall_check_shutdown_time_seconds = None
        self.mpi_threads_disable = self.num_nccl_streams = self.thread_affinity = None
        self.gloo_timeout_seconds = self.log_level = self.log_with_timestamp = None


def __getattr__(name: str) -> Any:
    if name == "run":
        from horoclone.launch.api import run

        globals()["run"] = run
        return run
    raise AttributeError(f"module 'horoclone.runner' has no attribute {name!r}")
