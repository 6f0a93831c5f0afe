"""examples/torch_wide_deep.py: with servers, in rounds and asynchronously, it is as good as in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ps_cluster import Cluster


def loss_of(text: str) -> float:
    (found,) = re.findall(r"loss on clicks that nobody has seen: ([\d.]+)", text)
    return float(found)


@pytest.mark.long(120)
@pytest.mark.timeout(300)
def test_wide_and_deep_with_servers_is_as_good_as_one_process(
    cluster: Cluster, launch: Any, examples: Path
) -> None:
    program = [sys.executable, examples / "torch_wide_deep.py"]
    alone = loss_of(launch(program, timeout_s=120).output)
    run = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program, "--store", cluster.address]
    run += ["--server", "test", "--secret-file", cluster.secret_file]
    rounds = loss_of(launch([*run, "--staleness", "0"], timeout_s=120).output)
    print(f"loss alone {alone}, in rounds {rounds}")
    assert abs(rounds - alone) <= 0.01 * alone
    assert alone < 0.5  # ln 2 is what a guess has
