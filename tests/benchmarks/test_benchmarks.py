"""The benchmarks: their statistics, their checking of results, and one tiny run from end to end."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from world import ran

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/, as its scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_a_call_lasts_as_long_as_its_slowest_rank(load):
    statistics = load("statistics_of")
    assert statistics.slowest_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError, match="same calls"):
        statistics.slowest_rank([[1.0], [1.0, 2.0]])
    with pytest.raises(ValueError):
        statistics.slowest_rank([])


def test_summary_is_the_median_of_the_rounds_medians(load):
    summarise = load("statistics_of").summarise
    one = summarise([[1.0, 2.0, 90.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    assert one.rounds_us == [2.0, 5.0, 8.0]  # 90 us in one call does not move its round
    assert (one.median_us, one.low_us, one.high_us) == (5.0, 2.0, 8.0)
    assert (one.max_us, one.p99_us, one.calls) == (90.0, 90.0, 9)
    assert summarise([list(range(1, 201))]).p99_us == 199
    for nothing in ([], [[1.0], []]):
        with pytest.raises(ValueError):
            summarise(nothing)


def test_ratio_is_above_one_when_the_peer_is_slower(load):
    ratio_of = load("statistics_of").ratio_of
    clear = ratio_of([10.0, 11.0, 12.0, 10.5, 11.5, 10.2, 11.1], [20.0, 23.0, 24.0, 21.0, 22.0, 21.5, 22.5])
    assert clear.verdict == "faster"
    assert clear.ratio == 2.0
    assert 1.0 < clear.low <= clear.ratio <= clear.high
    assert ratio_of([20.0] * 7, [10.0] * 7).verdict == "slower"
    mixed = ratio_of([10.0, 20.0, 10.0, 20.0, 15.0, 14.0, 16.0], [15.0, 15.1, 14.9, 15.0, 15.0, 15.2, 14.8])
    assert mixed.verdict == "undecided"
    assert mixed.low < 1.0 < mixed.high
    with pytest.raises(ValueError, match="same rounds"):
        ratio_of([1.0, 2.0], [1.0])


def test_slow_rounds_cancel_because_rounds_are_drawn_in_pairs(load):
    slow = [1.0, 3.0, 9.0, 2.0, 5.0, 1.0, 7.0]  # everybody was slowed down alike
    exact = load("statistics_of").ratio_of([10.0 * s for s in slow], [20.0 * s for s in slow])
    assert (exact.ratio, exact.low, exact.high) == (2.0, 2.0, 2.0)


def test_an_interval_that_touches_one_decides_nothing(load):
    verdict_of = load("statistics_of").verdict_of
    assert [verdict_of(*edges) for edges in ((1.01, 2), (1.0, 2), (0.9, 1.0), (0.5, 0.99))] == [
        "faster", "undecided", "undecided", "slower",
    ]  # fmt: skip


def test_noise_forbids_conclusions(load):
    statistics = load("statistics_of")
    loads, reasons = statistics.loads_against, statistics.reasons_against
    assert loads(0.1, 0.2) == loads(0.1, None) == []  # None: no /proc/stat
    assert "before the start" in loads(0.4, 0.0)[0]
    assert "during" in loads(0.0, 0.4)[0]
    assert reasons((100.0, 109.0), 7) == []
    assert "too few" in reasons((100.0, 100.0), 6)[0]
    for drifting in ((100.0, 111.0), (111.0, 100.0)):
        assert "memcpy" in reasons(drifting, 7)[0]


def test_names_of_sizes(load):
    size_text = load("report").size_text
    assert [size_text(n) for n in (4, 1024, 1028, 25 << 20)] == ["4 B", "1 KiB", "1028 B", "25 MiB"]


@pytest.mark.parametrize("count", [1, 3, 1021, 5000])
def test_wrong_results_are_found(load, count):
    torch = pytest.importorskip("torch")
    inputs = load("inputs")
    ranks = [inputs.Inputs(rank, 3, 5000) for rank in range(3)]
    parts = [torch.empty(count) for _ in ranks]
    for one, part in zip(ranks, parts, strict=True):
        one.write(part, 17)
        one.check(part, 17, False)
    right = sum(parts)
    ranks[0].check(right, 17, True)
    for wrong in (right + 0.0, parts[0]):
        wrong[count // 2] += 1  # one element of the sum; and no sum at all
        with pytest.raises(RuntimeError, match="not"):
            ranks[0].check(wrong, 17, True)
    with pytest.raises(RuntimeError):  # the result of the call before
        ranks[0].check(right, 18, True)


def test_arguments(load, capsys):
    parse = load("allreduce").parse
    assert parse([]).sizes[0] == 4 and parse([]).sizes[-1] == 64 << 20
    assert set(parse(["--full"]).sizes) - set(parse([]).sizes) == {25 << 20, 256 << 20}
    assert parse(["--short"]).rounds == 7 and len(parse(["--short"]).sizes) == 6
    for wrong in (
        ["--sizes", "6"],
        ["--contestants", "nccl"],
        ["--contestants", "oneccl"],
        ["--rounds", "0"],
        ["--short", "--full"],
    ):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "nccl" in capsys.readouterr().err


def test_a_name_with_a_comma_is_one_name(load):
    known = ("vgg", "vgg, fast link")
    for text, wanted in (
        ("vgg, fast link", [known[1]]),
        ("vgg;vgg, fast link", list(known)),
        ("vgg", ["vgg"]),
    ):
        assert (
            load("session").options("Doc.", ["--cases", text], ("--cases", ["vgg"], "", known)).cases
            == wanted
        )


@pytest.mark.mpi
@pytest.mark.long(40)
def test_a_tiny_run(open_mpi, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("mpi4py")
    command = [
        sys.executable, FOLDER / "allreduce.py", "--sizes", "4,4096", "--rounds", "2", "--force", "--settle", "0.2",
        "--limit", "150", "--mpi", open_mpi.mpirun, "--json", tmp_path / "out" / "result.json",
    ]  # fmt: skip
    done = ran(*command, timeout=170, env={**os.environ, **open_mpi.env})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"settings", "machine", "versions", "noise", "sizes", "loop_4_bytes"} <= set(result)
    assert [one["bytes"] for one in result["sizes"]] == [4, 4096]
    mpi = result["versions"]["mpi"]
    for one in result["sizes"]:
        assert set(one["contestants"]) == {"horoclone", "horoclone async", "gloo", mpi, "memcpy"}
        assert set(one["ratios"]["horoclone"]) == {"gloo", mpi, "memcpy"}
        for summary in one["contestants"].values():
            assert 0 < summary["low_us"] <= summary["median_us"] <= summary["high_us"] <= summary["max_us"]
            assert len(summary["rounds_us"]) == 2
    assert set(result["loop_4_bytes"]["contestants"]) == {"horoclone", "horoclone async", "gloo", mpi}
    assert "4 KiB" in done.stdout and "vs gloo" in done.stdout
    assert ("NO CONCLUSION" in done.stdout) == (not result["noise"]["conclusive"])
    assert os.uname().nodename not in json.dumps(result["machine"])


@pytest.mark.mpi
@pytest.mark.long(40)
@pytest.mark.skipif(not shutil.which("g++"), reason="the calls are timed in C++: needs g++")
def test_a_tiny_run_from_cpp(open_mpi, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("mpi4py")
    command = [
        sys.executable, FOLDER / "core.py", "--sizes", "4,65536", "--rounds", "1", "--force", "--settle", "0.2",
        "--limit", "100", "--mpi", open_mpi.mpirun, "--json", tmp_path / "result.json",
    ]  # fmt: skip
    done = ran(*command, env={**os.environ, **open_mpi.env})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    mpi = result["versions"]["mpi"]
    for one in result["sizes"]:
        assert set(one["contestants"]) == {"horoclone", "horoclone bucket", mpi, "memcpy"}
        assert set(one["ratios"]["horoclone bucket"]) == {mpi, "memcpy"}
    assert set(result["loop_4_bytes"]["contestants"]) == {"horoclone", mpi}


@pytest.mark.mpi
@pytest.mark.long(40)
@pytest.mark.skipif(not shutil.which("g++"), reason="the calls are timed in C++: needs g++")
def test_a_tiny_run_of_two_builds(tmp_path):
    root = FOLDER.parent
    if not (root / ".venv" / "bin" / "mpirun").exists():
        pytest.skip("this checkout has no .venv with Open MPI in it")
    command = [
        sys.executable, FOLDER / "two_builds.py", root, root, "--sizes", "4", "--rounds", "2", "--only", "4]",
        "--force", "--settle", "0", "--json", tmp_path / "result.json",
    ]  # fmt: skip
    done = ran(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert ["core", "bucket", 4] in [row["case"] for row in rows] and len(rows) == 7
    for row in rows:
        assert len(row["before"]["rounds_us"]) == len(row["after"]["rounds_us"]) == 2
        assert row["ratio"]["low"] <= row["ratio"]["ratio"] <= row["ratio"]["high"]
    assert "before / after" in done.stdout


def test_two_builds_need_an_environment_each(load, tmp_path, capsys):
    assert load("two_builds").main([str(tmp_path), str(tmp_path), "--force", "--settle", "0"]) == 1
    assert ".venv" in capsys.readouterr().err


def test_what_must_cross_the_cable(load):
    link_bytes = load("network").link_bytes
    assert [link_bytes(label, 1000, 1) for label in ("horoclone", "gloo")] == [1000, 1000]
    assert [link_bytes(label, 1000, 2) for label in ("horoclone", "horoclone flat", "gloo")] == [
        1000,
        1500,
        1500,
    ]
    assert link_bytes("gloo", 1000, 4) == 1750


def test_network_figures_that_cannot_be(load):
    network = load("network")
    line = {"ratio": 0.95, "low": 0.94, "high": 0.96}
    result = {
        "case": {"per_host": 1, "lo_bytes": [1000, 2000]},
        "sizes": [
            {"bytes": 25 << 20, "found": {"of line": line, "horoclone of raw": {**line, "ratio": 1.005}}}
        ],
    }
    assert network.doubts(result) == []
    result["sizes"][0]["found"]["of line"] = {**line, "ratio": 1.2}
    result["sizes"].append({"bytes": 1 << 20, "found": {}})
    result["case"]["lo_bytes"] = [0, 5 << 20]
    reasons = network.doubts(result)
    assert len(reasons) == 3 and "loopback" in reasons[0] and "more than there can be" in reasons[1], reasons
    assert "burst" in reasons[2]


def test_shapes_of_models_and_their_buckets(load):
    gradients = load("gradients")
    assert (len(gradients.resnet50()), sum(gradients.resnet50())) == (161, 25_557_032)
    assert gradients.resnet50()[:2] == [1000, 2_048_000]  # as backward completes them
    ranges = gradients.buckets([100_000, 200_000, 100_000, 7_000_000, 5])
    assert ranges == [(0, 300_000), (300_000, 7_400_000), (7_400_000, 7_400_005)]


@pytest.mark.mpi
@pytest.mark.long(40)
def test_sets_of_tensors(load, open_mpi, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("mpi4py")
    for name, value in open_mpi.env.items():
        monkeypatch.setenv(name, value)
    plan = {"sizes": [64], "rounds": 1, "contestants": ["async", "gloo", "mpi"], "memory": "private", "seed": 1,
            "extras": False, "sets": {"few": [300, 1, 7]}}  # fmt: skip
    raw = load("start").run_ranks(plan, 2, 100, "none", str(open_mpi.mpirun))
    result = load("report").analyse(raw, {"rounds": 1})
    assert len(result["sizes"][0]["contestants"]) == 3
    ways = {label.split(", ")[1] for label in result["sets"]["few"] if label.startswith("horoclone")}
    assert ways == {"one by one", "grouped", "buckets"}
    assert len(result["sets"]["few"]) == 9 and all(w["calls"] for w in result["sets"]["few"].values())


@pytest.mark.long(40)
def test_counters_of_control_and_of_idle_engines_and_dtypes(tmp_path):
    pytest.importorskip("torch")
    options = {
        "control.py": ["--np", "2", "--steps", "3"],
        "idle.py": ["--np", "2", "--seconds", "0.3"],
        "dtypes.py": ["--sizes", "4096", "--rounds", "1"],
    }
    results = {}
    for program, more in options.items():
        path = tmp_path / f"{program}.json"
        command = [sys.executable, FOLDER / program, *more, "--force", "--settle", "0.1", "--json", path]
        done = ran(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        results[program] = json.loads(path.read_text())
    rows = {(row["way"], row["form"]): row for row in results["control.py"]["rows"]}
    assert len(rows) == 5 and not any(row["broken"] for row in rows.values())
    # A persistent plan needs no message
    assert rows["shared memory", "declared"]["mean messages of all"] == 0
    assert set(rows["TCP", "grouped"]["messages by role"]) == {"root", "leaf"}
    assert rows["TCP", "grouped"]["others messages"] > 0
    assert set(results["dtypes.py"]["dtypes"]["4096"]) == {"float32", "float16", "bfloat16"}
    for ranks in results["idle.py"]["idle"].values():
        assert [rank["messages"] for rank in ranks] == [0, 0]


@pytest.mark.long(40)
def test_what_views_cost_is_measured_while_everything_looks(tmp_path):
    for package in ("rich", "prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(package)
    path = tmp_path / "views.json"
    options = ["--np", "2", "--rounds", "1", "--seconds", "1", "--force", "--settle", "0.1", "--json", path]
    command = list(map(str, [sys.executable, FOLDER / "views.py", *options]))
    done = ran(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert {"launcher, no views", "launcher, alone", "launcher, watched", "top"} == set(result["of_a_core"])
    assert all(seen > 0 for seen in result["seen_in_the_last_turn"].values())
    assert all(ms > 0 for times in result["step_ms"].values() for ms in times)


@pytest.mark.netns
@pytest.mark.long(40)
@pytest.mark.usefixtures("needs_root")
def test_a_tiny_run_between_two_hosts(tmp_path):
    pytest.importorskip("torch")
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("no iproute2")
    command = [
        sys.executable, FOLDER / "network.py", "--cases", "1g-2x2", "--sizes", "1048576", "--rounds", "1", "--force",
        "--settle", "0.1", "--raw-s", "0.3", "--limit", "100", "--json", tmp_path / "network.json",
    ]  # fmt: skip
    done = ran(*command, timeout=150)
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    case = json.loads((tmp_path / "network.json").read_text())["cases"]["1g-2x2"]
    (size,) = case["sizes"]
    assert set(size["contestants"]) == {"horoclone", "horoclone flat", "gloo"}
    # 60 calls at least of each, whose data cannot have gone elsewhere
    assert case["case"]["cable_bytes"] > 60 * (1 << 20)
    assert size["found"]["of line"]["ratio"] > 0 and min(case["raw_gbit"]["rates"]) > 0
    assert "NO CONCLUSION" in done.stdout and "vs gloo" in done.stdout


@pytest.mark.long(40)
def test_the_gpu_benchmark_runs_in_host_memory(tmp_path):
    """That the script works: on a GPU it has not been run."""
    pytest.importorskip("torch")
    out = tmp_path / "gpu.json"
    tiny = [
        "--model", "tiny", "--batch-size", "4", "--rounds", "2", "--steps", "2", "--warm", "1", "--bytes",
        "4096", "--buckets", "2", "--bucket-bytes", "4096",
    ]  # fmt: skip
    done = ran(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", FOLDER / "gpu.py", "--device", "cpu", *tiny, "--json", out)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found["times"]) == {"alone", "ddp", "ddp view", "horoclone"} and found["facts"]["ranks"] == 2
    assert all(len(one["step_ms"]) == 2 and min(one["step_ms"]) > 0 for one in found["times"].values())
    assert set(found["allreduce"]["4096"]) == {"torch.distributed", "horoclone"}
    assert {name: len(cpu) for name, cpu in found["buckets"].items()} == {
        "torch.distributed": 2,
        "horoclone": 2,
    }
    assert found["bound"] is None and "none of the aims for GPUs was measured" in done.stdout


def test_what_the_gpu_benchmark_makes_of_its_measurements(load):
    figures = load("gpu_figures")

    assert figures.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
    with pytest.raises(ValueError):
        figures.ratio([1.0], [1.0, 2.0])
    # Packed, reduced and unpacked, by each of two ranks: six bytes of traffic for each byte of a tensor, twice.
    assert figures.shared_gpu_bound_gb(4800.0, 2) == 400.0
    assert figures.faster({"a": {"step_ms": [3.0]}, "b": {"step_ms": [2.0]}}, ["a", "b", "c"]) == "b"
    assert figures.faster({}, ["a"]) is None
    assert figures.per_second(64, 2, 100.0) == 1280.0
    steps = {
        "ddp": {"step_ms": [10.0, 12.0, 10.0], "cpu_ms": [1.0, 1.0, 1.0]},
        "horoclone graph": {"step_ms": [5.0, 12.0, 9.0], "cpu_ms": [0.1, 0.2, 0.3]},
    }
    header, ddp, ours = figures.steps_table(steps, 64, 2, "images/s").splitlines()
    assert header.split() == ["contestant", "step", "ms", "CPU", "ms", "images/s", "of", "ddp"]
    assert ddp.split() == ["ddp", "10.000", "1.000", "12800", "1.000"]
    assert ours.split() == ["horoclone", "graph", "9.000", "0.200", "14222", "0.900"]
    rates = {"67108864": {"torch.distributed": 20.0, "horoclone": 800.0}}
    shared = figures.bandwidth_table(rates, 1000.0)
    assert "40.00 times torch.distributed, 0.80 of the bound 1000.0 GB/s" in shared
    assert "bound" not in figures.bandwidth_table(rates, None)
    assert "12.50 us" in figures.buckets_table({"horoclone": [12.0, 12.5, 30.0]})


def test_every_aim_of_the_gpu_benchmark_is_a_row_that_holds_is_missed_or_was_not_measured(load):
    figures = load("gpu_figures")
    steps = {name: {"step_ms": [ms, ms]} for name, ms in (("ddp", 10.0), ("horoclone", 9.9))}
    nothing = {"buckets": {}, "allreduce": {}, "bound": None}
    assert [gate.holds for gate in figures.gates(1, steps, nothing)] == [True, *[None] * 5]
    assert {gate.holds for gate in figures.gates(2, steps, nothing)} == {None}, "at world size 1 only"
    assert figures.gates_table(figures.gates(2, steps, nothing)).count("not measured in this run") == 6
    steps |= {name: {"step_ms": [ms]} for name, ms in (("ddp graph", 5.2), ("ddp view graph", 5.0))}
    steps |= {
        "horoclone graph": {"step_ms": [5.06]},
        "ddp view": {"step_ms": [9.8, 9.8]},
    }  # the faster of the two
    sizes = {"65536": 1.0, "67108864": 700.0, "268435456": 900.0}
    found = {
        "buckets": {"torch.distributed": [10.0], "horoclone": [12.0, 14.0, 13.0]},
        "allreduce": {size: {"torch.distributed": 150.0, "horoclone": rate} for size, rate in sizes.items()},
        "bound": 1000.0,
    }
    rows = figures.gates(1, steps, found)
    assert [gate.holds for gate in rows] == [False, False, True, False, False, False]
    assert [round(gate.found, 3) for gate in rows] == [1.01, 1.012, 13.0, 1.3, 0.7, 4.667]
    alone = figures.gates(2, steps, {**found, "bound": None})
    assert [gate.found for gate in alone[4:]] == [None, None], "a GPU for each rank"


def test_the_overlap_in_a_trace(load, tmp_path):
    programs = load("gpu_programs")
    assert programs.covered([(0.0, 10.0)], [(2.0, 4.0), (3.0, 6.0), (20.0, 30.0)]) == 0.4
    assert programs.covered([], [(0.0, 1.0)]) == 0.0
    events = [{"cat": "kernel", "name": name, "ts": ts, "dur": 10.0} for name, ts in (
        ("hc_peers_reduce", 0.0), ("ncclDevKernel_AllReduce", 100.0), ("sgemm", 5.0), ("sgemm", 50.0))]  # fmt: skip
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "name": "aten::mm"}]}))
    found = programs.overlap_in(trace)
    assert found == {"kernels that communicate": 2, "kernels that compute": 2, "overlap": 0.25}
