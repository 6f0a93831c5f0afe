"""An elastic job on the fakes of CUDA and NCCL: communicators of a lost generation are aborted, and made anew."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("on_fakes.py")
RUN = [sys.executable, "-m", "horoclone.launch"]


def test_a_rank_is_killed_while_its_gpu_works_and_the_others_make_another_communicator(
    launch: Any, watch: Any, on_fakes: dict[str, str], tmp_path: Path
) -> None:
    env = {**on_fakes, "HOROCLONE_GPU_OPERATIONS": "nccl", "HC_FAKE_DELAY_US": "2000"}
    command = [*RUN, "-np", "3", "--min-np", "2", sys.executable, WORKER, "60", tmp_path / "mark"]
    job = watch(launch.start(command, env=env))
    first = job.whole(1)
    second = job.whole(2)
    assert second == {0: first[0], 1: first[2]}
    done = job.finish(timeout_s=90)
    numbers = [int(one) for one in re.findall(r"\] communicators (\d+)", done.stdout)]
    assert numbers and set(numbers) == {1}, done.output  # that of the generation, and none of those before
    assert {int(one) for one in re.findall(r"\] left (\d+)", done.stdout)} == {0}, done.output
