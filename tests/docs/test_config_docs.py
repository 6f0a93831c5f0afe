"""The pages of settings are printed from the table of settings, and the table is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from world import load

from horoclone import settings

ROOT = Path(__file__).resolve().parents[2]


INTERNAL = {  # between the launcher, or a task of Spark, and its own child
    "HOROCLONE_FUNCTION_FDS",
    "HOROCLONE_SLOT_FUNCTION_FD",
    "HOROCLONE_SLOT_PYTHON",
    "HOROCLONE_SLOT_FOLDER",
}
NOT_READ = {one.name for one in settings.UNREAD} | set(settings.BUILD_TIME)


@pytest.fixture(scope="module")
def knobs() -> list[dict[str, str]]:
    core = pytest.importorskip("horoclone._core", reason="the native module is not built")
    return json.loads(core.knobs())


def test_the_pages_are_what_the_table_prints(knobs: list[dict[str, str]]) -> None:
    maker = load(ROOT / "docs" / "make_environment.py", "make_environment")
    for name, text in maker.pages(knobs).items():
        assert (ROOT / "docs" / name).read_text() == text, "run `make docs`"
    assert {f"HOROCLONE_{name}" for name in maker.OFTEN} <= {knob["name"] for knob in knobs}
    assert len(maker.OFTEN) <= 30


def test_names_are_unique_and_every_setting_says_what_it_does(knobs: list[dict[str, str]]) -> None:
    names = [knob["name"] for knob in knobs]
    assert len(names) == len(set(names)) and len(names) > 30
    for knob in knobs:
        assert knob["name"].startswith("HOROCLONE_"), knob
        assert knob["horovod"] is None or knob["horovod"].startswith("HOROVOD_"), knob
        assert len(knob["help"]) > 15, knob


def test_every_variable_that_the_sources_name_is_in_the_table(knobs: list[dict[str, str]]) -> None:
    known = {knob["name"] for knob in knobs} | {knob["horovod"] for knob in knobs}
    # A name in quotes is read or set somewhere; a prefix (ending in "_") selects many.
    quoted = re.compile(r"[\"']((?:HOROCLONE|HOROVOD)_[A-Z0-9_]*[A-Z0-9])[\"'=]")
    used: dict[str, str] = {}
    for path in [*ROOT.glob("horoclone/**/*.py"), *ROOT.glob("csrc/**/*.cc"), *ROOT.glob("examples/*.py")]:
        if "tests" not in path.relative_to(ROOT).parts:
            used.update({name: str(path.relative_to(ROOT)) for name in quoted.findall(path.read_text())})
    unknown = {name: path for name, path in used.items() if name not in known | INTERNAL | NOT_READ}
    assert not unknown, f"not in the table of csrc/base/settings_table.cc: {unknown}"
    assert not known & NOT_READ - {"HOROVOD_CPU_OPERATIONS"}, (
        "read after all: take it out of horoclone/settings.py"
    )


def test_the_pages_have_every_variable_of_horovod() -> None:
    """Those of its documentation and sources: at run time, of its launchers, and at build time."""
    page = "".join(page.read_text() for page in (ROOT / "docs").glob("environment*.md"))
    parts = """FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE
        AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES
        AUTOTUNE_GAUSSIAN_PROCESS_NOISE TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS
        STALL_SHUTDOWN_TIME_SECONDS NUM_NCCL_STREAMS BATCH_D2D_MEMCOPIES DISABLE_GROUP_FUSION ENABLE_ASYNC_COMPLETION
        ENABLE_XLA_OPS DYNAMIC_PROCESS_SETS ELASTIC CONTROLLER CPU_OPERATIONS MPI_THREADS_DISABLE THREAD_AFFINITY
        ADASUM_MPI_CHUNK_SIZE CCL_CACHE GLOO_IFACE GLOO_TIMEOUT_SECONDS GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT RANK
        SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME LOG_LEVEL LOG_HIDE_TIME DISABLE_NVTX_RANGES
        START_TIMEOUT ELASTIC_TIMEOUT SPARK_START_TIMEOUT SPARK_WORK_DIR SPARK_PYTHONPATH
        SPARK_USE_LOCAL_RANK_GPU_INDEX WITH_PYTORCH WITHOUT_PYTORCH WITH_TENSORFLOW WITHOUT_TENSORFLOW WITH_MXNET
        WITHOUT_MXNET WITH_MPI WITHOUT_MPI WITH_GLOO WITHOUT_GLOO WITH_NVTX WITHOUT_NVTX GPU GPU_OPERATIONS GPU_ALLREDUCE
        GPU_ALLGATHER GPU_BROADCAST GPU_ALLTOALL GPU_REDUCESCATTER ALLOW_MIXED_GPU_IMPL CUDA_HOME BUILD_CUDA_CC_LIST
        ROCM_HOME NCCL_HOME NCCL_INCLUDE NCCL_LIB NCCL_LINK BUILD_ARCH_FLAGS CMAKE DEBUG SKIP_COMPILE LOCAL_VERSION"""
    names = [f"HOROVOD_{part}" for part in parts.split()]
    names += ["_HOROVOD_SECRET_KEY", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "DDL_OPTIONS"]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOROCLONE_FUSION_THRESHOLD", "lots"),
        ("HOROCLONE_SHARED_MEMORY", "perhaps"),
        ("HOROCLONE_CYCLE_TIME", "-1"),
        ("HOROVOD_CACHE_CAPACITY", "1.5"),
        ("HOROCLONE_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_accepted(name: str, value: str) -> None:
    module = pytest.importorskip("horoclone.runtime.native_module")
    with pytest.raises(ValueError, match=rf"{name}='{re.escape(value)}'.*accepted is"):
        module.core().Runtime({name: value})


def test_the_horoclone_name_wins_over_the_horovod_name() -> None:
    module = pytest.importorskip("horoclone.runtime.native_module")
    with pytest.raises(ValueError, match="HOROCLONE_CACHE_CAPACITY"):
        module.core().Runtime({"HOROCLONE_CACHE_CAPACITY": "x", "HOROVOD_CACHE_CAPACITY": "y"})
