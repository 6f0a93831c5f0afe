"""NVTX ranges around submission, launch and completion, heard by a tool of our own; on the fakes, so no GPU takes part."""

from __future__ import annotations

import ctypes
import os
import shutil
import site
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import horoclone as hvd
from horoclone import ops, runtime

SOURCE = Path(__file__).with_name("nvtx_counter.c")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    places = [Path(folder) for folder in site.getsitepackages()]
    headers = [path for place in places for path in place.glob("nvidia/*/include/nvtx3/nvToolsExt.h")]
    if compiler is None or not headers:
        pytest.skip("NVTX's headers, or a compiler, are not here: pip install nvidia-nvtx")
    made = tmp_path_factory.mktemp("nvtx") / "libcounter.so"
    command = [
        compiler, "-O1", "-fPIC", "-shared", f"-I{headers[0].parent}", str(SOURCE), "-o", str(made),
        "-pthread"
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=100)
    return made


def heard(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, text) for what, _, text in (line.partition("\t") for line in lines)]


def reduces_on_the_fake() -> None:
    """Without a framework: memory and stream of the fake, through the runtime's own calls."""
    hvd.init()
    cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
    context, stream, at = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), hvd.local_rank()) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(4000)) == 0
    core, kind = runtime.native(), list(ops.DTYPES).index("float32")
    for i in range(5):
        handle = core.submit(ops.ALLREDUCE, f"gradient {i}", at.value, at.value, (1000,), kind, ops.Sum, 1.0, 1.0, 0, 0,
                             None, 0, hvd.local_rank(), stream.value)  # fmt: skip
        core.wait(handle)
        core.stream_wait(handle, stream.value)
        core.release(handle)
    assert cuda.cuStreamSynchronize(stream) == 0
    assert hvd.allreduce(np.ones(3), name="on the host", op=hvd.Sum).tolist() == [2.0] * 3
    hvd.shutdown()


def test_a_tool_hears_of_submission_launch_and_completion(
    worker_pool, tool: Path, on_fakes: dict[str, str], tmp_path: Path
) -> None:
    env = {**on_fakes, "NVTX_INJECTION64_PATH": str(tool)}
    team = worker_pool(reduces_on_the_fake, 2, env={**env, "HC_TEST_NVTX": str(tmp_path / "heard")})
    assert team.wait(60) == [0, 0], team.outputs()
    events = heard(tmp_path / "heard")
    count = Counter(what for what, _ in events)
    assert count["domain"] == 2 and ("domain", "horoclone") in events
    assert count["push"] == count["pop"] > 20 and count["start"] == count["end"] > 20
    texts = Counter(events)
    for i in range(5):  # each on two ranks
        assert texts["push", f"submit allreduce 'gradient {i}'"] == 2
        assert texts["start", f"allreduce 'gradient {i}'"] == 2
        assert texts["push", f"complete allreduce 'gradient {i}'"] == 2
    launches = sum(
        n for (what, text), n in texts.items() if what == "start" and text.startswith("launch allreduce")
    )
    assert launches == 10, texts


def reduces() -> None:
    hvd.init()
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
    hvd.shutdown()


def test_without_a_tool_nothing_is_loaded_and_a_wrong_one_is_named(
    worker_pool, tool: Path, tmp_path: Path
) -> None:
    quiet = worker_pool(reduces, 2, env={"HC_TEST_NVTX": str(tmp_path / "heard")})
    assert quiet.wait(60) == [0, 0] and heard(tmp_path / "heard") == []
    wrong = worker_pool(reduces, 2, env={"NVTX_INJECTION64_PATH": str(tmp_path / "no_tool.so")})
    assert wrong.wait(60) == [0, 0], "a job goes on without its tool"
    assert "NVTX_INJECTION64_PATH names a tool that cannot be loaded" in wrong.outputs()
