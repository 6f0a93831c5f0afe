"""What is found of CUDA and NCCL, and what is said where something is missing. On fakes of both: no GPU takes part."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from world import ran, run_python

core = pytest.importorskip("horoclone._core", reason="the native module is not built")

REPORT = """
import ctypes, json, sys
settings, preload = json.loads(sys.argv[1]), sys.argv[2]
if preload:
    ctypes.CDLL(preload)
import horoclone._core as core
report = json.loads(core.device_report(settings))
if report["cuda"]["found"]:
    cuda = ctypes.CDLL(report["cuda"]["file"])
    report["contexts"] = [cuda.hc_fake_count(b"contexts", device) for device in range(4)]
print(json.dumps(report))
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOROCLONE_", "HC_FAKE"))
    }
    return {**kept, **extra}


def report(settings: dict[str, Any], preload: Path | str = "", **env: str) -> Any:
    settings = {"HOROCLONE_KERNEL_CACHE": "off", **settings}
    done = run_python(
        REPORT,
        json.dumps({k: str(v) for k, v in settings.items()}),
        str(preload),
        env=environment(**env),
        check=True,
    )
    return json.loads(done.stdout)


def cuda_of(fakes: Path) -> dict[str, Any]:
    return {"HOROCLONE_CUDA_LIBRARY": fakes / "libcuda.so.1"}


def test_fake_file_version_and_devices_are_reported_without_a_context(fakes: Path) -> None:
    found = report({**cuda_of(fakes), "HOROCLONE_NCCL_FOLDERS": f"/nowhere:{fakes}"}, HC_FAKE_DEVICES="2")
    assert found["cuda"] == {
        "found": True,
        "platform": "CUDA",
        "file": str(fakes / "libcuda.so.1"),
        "version": "12.8",
        "devices": ["Test fake 0 (no GPU)", "Test fake 1 (no GPU)"],
    }
    nccl = found["nccl"]
    assert nccl["found"] and nccl["version"] == "2.28.9" and nccl["where"] == "pip package"
    assert nccl["file"] == str(fakes / "libnccl.so.2")
    assert nccl["features"] == {"mem_alloc": True, "buffers": True, "windows": True, "shrink": False}
    assert found["contexts"] == [0, 0, 0, 0], "asking made a context"


def test_fake_hip_is_taken_with_rccl_and_hiprtc_where_the_process_has_it(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakes / "hip"))  # the folder has no fake of CUDA
    found = report({}, preload=fakes / "hip" / "libamdhip64.so", HC_FAKE_DEVICES="1")
    assert found["cuda"] == {
        "found": True,
        "platform": "HIP",
        "file": str(fakes / "hip" / "libamdhip64.so"),
        "version": "6.3",
        "devices": ["Test fake 0 (no GPU)"],
    }
    assert found["nccl"]["file"] == str(fakes / "hip" / "librccl.so")
    assert found["nccl"]["features"]["buffers"] is found["nccl"]["features"]["windows"] is False
    assert found["kernels"]["compiled"] == "hipRTC 13.0 for gfx90a:sramecc+:xnack-"
    failed = report({}, preload=fakes / "hip" / "libamdhip64.so", HC_FAKE_CUDA_FAIL="cuInit:1:3")["cuda"]
    assert (
        "hipInit: " in failed["reason"]
        and "HIP error 3" in failed["reason"]
        and "rocminfo" in failed["reason"]
    )


def test_fake_the_copy_that_the_process_has_loaded_wins(fakes: Path) -> None:
    folders = {"HOROCLONE_NCCL_FOLDERS": fakes / "incomplete"}
    found = report({**cuda_of(fakes), **folders}, preload=fakes / "libnccl.so.2")["nccl"]
    assert found["where"] == "already loaded in this process" and found["file"] == str(fakes / "libnccl.so.2")


@pytest.mark.parametrize(
    ("settings", "env", "said"),
    [
        ({}, {"HC_FAKE_NCCL_VERSION": "2805"}, ("2.8.5", "too old", "2.14.0", "pip install nvidia-nccl-cu12 --upgrade")),
        ({}, {"HC_FAKE_NCCL_VERSION": "21304"}, ("2.13.4", "too old")),
        ({"HOROCLONE_NCCL_LIBRARY": "incomplete/libnccl.so.2"}, {}, ("has no ncclRedOpCreatePreMulSum", "incomplete")),
        ({"HOROCLONE_NCCL_LIBRARY": "absent.so"}, {}, ("absent.so", "HOROCLONE_NCCL_LIBRARY names this file); unset it")),
        (
            {},
            {"HC_FAKE_NCCL_VERSION": "2805", "HC_FAKE_CUDA_VERSION": "13000"},
            ("pip install nvidia-nccl-cu13",),
        ),
    ],
)  # fmt: skip
def test_fake_why_nccl_cannot_be_used(
    fakes: Path, settings: dict[str, str], env: dict[str, str], said: tuple[str, ...]
) -> None:
    paths = {name: fakes / value for name, value in settings.items()}
    base = {**cuda_of(fakes), "HOROCLONE_NCCL_FOLDERS": fakes}
    found = report({**base, **paths}, **env)["nccl"]
    assert not found["found"]
    for words in said:
        assert words in found["reason"], found["reason"]


def test_fake_why_cuda_cannot_be_used(fakes: Path, tmp_path: Path) -> None:
    failed = report(cuda_of(fakes), HC_FAKE_CUDA_FAIL="cuInit:1:2")["cuda"]
    assert (
        not failed["found"]
        and "cuInit: out of memory" in failed["reason"]
        and "--gpus all" in failed["reason"]
    )
    wrong = report({"HOROCLONE_CUDA_LIBRARY": fakes / "libnccl.so.2"})["cuda"]
    assert not wrong["found"] and "has no cuInit: the driver is too old; CUDA 11.4" in wrong["reason"]
    absent = report({"HOROCLONE_CUDA_LIBRARY": tmp_path / "no.so"})["cuda"]
    assert "no.so" in absent["reason"] and "HOROCLONE_CUDA_LIBRARY" in absent["reason"]


def test_fake_where_the_kernels_come_from_or_why_there_are_none(fakes: Path) -> None:
    found = report({**cuda_of(fakes), "HOROCLONE_NVRTC_LIBRARY": fakes / "libnvrtc.so.13"})["kernels"]
    built_in = found["where"] == "built in"  # nvcc was there when this library was built
    assert found["found"] and (
        built_in or (found["version"], found["file"]) == ("13.0", str(fakes / "libnvrtc.so.13"))
    )
    assert built_in or found["compiled"] == "NVRTC 13.0 for sm_90"
    off = report({**cuda_of(fakes), "HOROCLONE_GPU_KERNELS": "off"})["kernels"]
    assert not off["found"] and "HOROCLONE_GPU_KERNELS is off" in off["reason"]
    if built_in:
        return
    for settings, env, said in (
        ({"LIBRARY": fakes / "incomplete/libnvrtc.so.13"}, {}, ("has no nvrtcGetPTX", "pip install nvidia-cuda-nvrtc")),
        ({"LIBRARY": fakes / "absent.so"}, {}, ("absent.so", "HOROCLONE_NVRTC_LIBRARY names this file")),
        # Of a newer CUDA than the driver's: what it makes could not be loaded.
        ({"FOLDERS": fakes}, {"HC_FAKE_CUDA_VERSION": "12040"}, ("libnvrtc.so.12", "pip install nvidia-cuda-nvrtc-cu12")),
    ):  # fmt: skip
        named = {f"HOROCLONE_NVRTC_{name}": path for name, path in settings.items()}
        missing = report({**cuda_of(fakes), **named}, **env)["kernels"]
        if not missing["found"]:
            assert all(words in missing["reason"] for words in said), missing
        else:  # the machine has an older NVRTC
            assert missing["file"].startswith("/") and str(fakes) not in missing["file"]


def test_fake_what_nvrtc_opens_by_name_is_loaded_from_beside_it(fakes: Path, tmp_path: Path) -> None:
    """The wheels of NVRTC 13.0 do not tell the loader where their builtins are: without them nothing compiles."""
    alone = tmp_path / "libnvrtc.so.13"
    shutil.copy(fakes / "libnvrtc.so.13", alone)
    missing = report({**cuda_of(fakes), "HOROCLONE_NVRTC_LIBRARY": alone})["kernels"]
    if missing.get("where") == "built in":
        pytest.skip("nvcc was there when this library was built")
    assert not missing["found"] and "failed to open libnvrtc-builtins.so.13.0" in missing["reason"]
    shutil.copy(fakes / "libnvrtc-builtins.so.13.0", tmp_path)
    assert report({**cuda_of(fakes), "HOROCLONE_NVRTC_LIBRARY": alone})["kernels"]["found"]
    fails = report(
        {**cuda_of(fakes), "HOROCLONE_NVRTC_LIBRARY": alone}, HC_FAKE_NVRTC_FAIL="nvrtcCompileProgram:1:6"
    )["kernels"]
    assert not fails["found"] and "NVRTC_ERROR_COMPILATION" in fails["reason"], "the doctor compiles them"


FORKED = """
import json, os, sys
import horoclone._core as core
settings = json.loads(sys.argv[1])
assert json.loads(core.device_report(settings))["cuda"]["found"]
child = os.fork()
if child == 0:
    print(json.loads(core.device_report(settings))["cuda"]["reason"], flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert json.loads(core.device_report(settings))["cuda"]["found"]
"""


def test_fake_a_child_of_a_process_that_has_used_cuda_is_told_so(fakes: Path) -> None:
    settings = {name: str(path) for name, path in cuda_of(fakes).items()}
    done = run_python(FORKED, json.dumps({**settings, "HOROCLONE_GPU_KERNELS": "off"}), env=environment())
    assert done.returncode == 0, done.stderr
    assert "CUDA error 3" in done.stdout and "forked" in done.stdout and "spawn" in done.stdout


def test_fake_the_doctor_and_check_build_say_what_was_found(fakes: Path) -> None:
    env = environment(
        HOROCLONE_CUDA_LIBRARY=str(fakes / "libcuda.so.1"),
        HOROCLONE_NCCL_LIBRARY=str(fakes / "libnccl.so.2"),
        HOROCLONE_NVRTC_LIBRARY=str(fakes / "libnvrtc.so.13"),
        HOROCLONE_KERNEL_CACHE="off",
    )
    tool = [sys.executable, "-m", "horoclone.launch.tool"]
    done = ran(*tool, "doctor", "--json", env=env)
    topics = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert topics["NCCL"]["status"] == "ok" and f"2.28.9, {fakes}/libnccl.so.2" in topics["NCCL"]["text"]
    assert topics["CUDA"]["status"] == "ok" and "4 visible: Test fake 0" in topics["CUDA"]["text"]
    assert topics["GPU kernels"]["status"] == "ok"
    table = ran(sys.executable, "-m", "horoclone.launch", "--check-build", env=env).stdout
    assert f"2.28.9, {fakes}/libnccl.so.2" in table
    assert "[X] NCCL" in table and "[X] CUDA" in table and "[X] GPU kernels" in table
    without = {**env, "HOROCLONE_NCCL_LIBRARY": str(fakes / "absent.so")}
    table = ran(sys.executable, "-m", "horoclone.launch", "--check-build", env=without).stdout  # fmt: skip
    assert "[ ] NCCL" in table and "absent.so" in table


def test_fake_what_is_built_answers_with_the_version(fakes: Path) -> None:
    code = "import horoclone as hvd; print(hvd.cuda_built(), hvd.rocm_built(), hvd.nccl_built())"
    for cuda, nccl, said in (
        ("libcuda.so.1", "libnccl.so.2", ["True", "False", "22809"]),
        ("hip/libamdhip64.so", "hip/librccl.so", ["False", "True", "22809"]),
        ("absent.so", "libnccl.so.2", ["False", "False", "0"]),
    ):
        env = {"HOROCLONE_CUDA_LIBRARY": str(fakes / cuda), "HOROCLONE_NCCL_LIBRARY": str(fakes / nccl)}
        done = run_python(code, env=environment(**env))
        assert done.stdout.split() == said, done.stderr
