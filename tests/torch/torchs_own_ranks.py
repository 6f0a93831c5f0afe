"""torch's tests of process groups as one class, on the backend `horoclone`. Imported by the runner (torchs_own.py), which has
set BACKEND and WORLD_SIZE, and by the process from which the ranks are forked.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from functools import wraps
from typing import Any

import torch.distributed as dist

import horoclone.torch  # noqa: F401 - registers the backend

OURS = "horoclone"
JOIN_S = 10.0  # how long a process that was told to end has before it is killed
BELIEVED = os.environ["BACKEND"]


def take_the_place_of(believed: str) -> None:
    """Groups that are asked for as `believed` are ours, and do not hide it."""

    def ours_instead(make: Any) -> Any:
        @wraps(make)
        def make_ours(*positional: Any, **named: Any) -> Any:
            if str(named.get("backend")).lower() == believed:
                named["backend"] = OURS
            return make(*positional, **named)

        return make_ours

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, ours_instead(getattr(dist, name)))
    dist.is_mpi_available = lambda: True


if BELIEVED != OURS:
    take_the_place_of(BELIEVED)

from torch.testing._internal.distributed import distributed_test  # noqa: E402


def enter(environment: dict[str, str], target: Any, *args: Any, **named: Any) -> None:
    """A rank's process begins: its parent was forked before the test had its folder."""
    os.environ.clear()
    os.environ.update(environment)
    distributed_test.INIT_METHOD = environment["INIT_METHOD"]
    target(*args, **named)


class OnHoroclone(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """All of torch's tests, with processes that are forked instead of started anew."""

    def setUp(self) -> None:
        super().setUp()
        context = multiprocessing.get_context("forkserver")

        def process(target: Any, name: str, args: Any, kwargs: Any) -> Any:
            everything = (dict(os.environ), target, *args)
            return context.Process(target=enter, name=name, args=everything, kwargs=kwargs)

        # The numbers of the processes, for every test.
        logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.WARNING)
        self._start_processes(process)

    def _check_return_codes(self, fn: Any, elapsed_s: float) -> None:
        """torch looks at how the first rank ended, and for errors that the others sent; a rank that crashed sends none."""
        super()._check_return_codes(fn, elapsed_s)
        if fn not in self.skip_return_code_checks:
            codes = [process.exitcode for process in self.processes]
            self.assertEqual(set(codes), {codes[0]}, f"the ranks ended with {codes}")

    def tearDown(self) -> None:
        started = list(self.processes)
        super().tearDown()
        for process in started:
            process.join(JOIN_S)
            if process.exitcode is None:
                process.kill()
                process.join(JOIN_S)
        if os.path.exists(self.file_name):
            os.remove(self.file_name)
