"""The bodies of the tests that need a GPU, in host memory: a wrong spelling or number is found without a GPU.

What they ask of torch.cuda has stand-ins that do nothing; whether streams wait for each other is not seen here.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import test_gpu
import test_gpu_features

NEEDS_A_GPU = {"test_a_captured_step_trains_as_an_uncaptured_one"}
SLOW = {
    "test_every_operation_and_dtype",
    "test_memory_of_an_operation_that_nobody_waits_for_is_not_given_away_too_early",
}
CASES = [
    pytest.param(
        module.__name__,
        name,
        size,
        id=f"{name}-{size}ranks",
        marks=[pytest.mark.in_turn] if name in SLOW else [],
    )
    for module in (test_gpu, test_gpu_features)
    for name, function in vars(module).items()
    if name.startswith("test_") and hasattr(function, "body") and name not in NEEDS_A_GPU
    for mark in function.pytestmark
    if mark.name == "parametrize" and mark.args[0] == "world_size"
    for size in mark.args[1]
]


def in_host_memory(module: str, name: str) -> None:
    """On every rank of a world."""
    sys.path.insert(0, str(Path(__file__).parent))
    both = [importlib.import_module(each) for each in ("test_gpu", "test_gpu_features")]
    stream = mock.MagicMock()
    stand_ins: dict[str, Any] = {
        "device_count": lambda: 1, "synchronize": lambda *_: None, "_sleep": lambda cycles: None,
        "Stream": lambda *_: stream, "current_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for each in both:
            stack.enter_context(mock.patch.object(each, "device", lambda: torch.device("cpu")))
        for what, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, what, stand_in))
        try:
            getattr(importlib.import_module(module), name).body()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("module", "name", "size"), CASES)
def test_in_host_memory(worlds: Any, module: str, name: str, size: int) -> None:
    worlds.run(size, in_host_memory, module=module, name=name)
