"""Under Horovod's name: what LSF says about the job, read from its own variables (LSB_*) and from this host."""

from __future__ import annotations

import os

from horoclone.launch.hosts import local_devices, usable_cores


class LSFUtils:
    """Facts about an LSF job. RuntimeError outside of one, except using_lsf()."""

    @staticmethod
    def using_lsf() -> bool:
        """Whether LSF started this process."""
        return "LSB_JOBID" in os.environ

    @staticmethod
    def _slots() -> dict[str, int]:
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        if len(words) < 2 or len(words) % 2:
            raise RuntimeError("LSB_MCPU_HOSTS does not list hosts and slots: this is no job of LSF")
        slots = {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}
        first = words[0]
        if len(slots) > 1 and slots[first] == 1 and set(slots.values()) != {1}:
            del slots[first]  # the batch node: it runs the job's script and no ranks
        return slots

    @staticmethod
    def get_compute_hosts() -> list[str]:
        """Hosts of the job, in LSF's order."""
        return list(LSFUtils._slots())

    @staticmethod
    def get_num_cores() -> int:
        """Slots of the first host."""
        return next(iter(LSFUtils._slots().values()))

    @staticmethod
    def get_num_gpus() -> int:
        """GPUs that a process of this host sees; every host of the job is taken to have as many."""
        return local_devices()

    @staticmethod
    def get_num_processes() -> int:
        """One for each GPU of each host; one for each slot where there is no GPU."""
        slots = LSFUtils._slots()
        return len(slots) * LSFUtils.get_num_gpus() or sum(slots.values())

    @staticmethod
    def get_num_threads() -> int:
        """Hardware threads of a core of this host, at least 1."""
        import psutil

        cores = psutil.cpu_count(logical=False) or usable_cores()
        return max(1, (psutil.cpu_count(logical=True) or cores) // cores)
