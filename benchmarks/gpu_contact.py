"""First contact with a GPU: `make gpu`. Parts in order, each with a limit of its own, each writing its results at once.

One GPU is enough; nothing is fetched. A part that fails or runs out of time is named and the rest goes on; out/gpu.json
and out/gpu.txt (a table with a verdict for every part and every aim) are there whatever happens, and out/gpu/ has the
output of each part. --long has the 1,000 lives and the soak instead. --doubles FOLDER tries all of it without a GPU, on
the doubles of the tests: then no figure means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_figures import OVERLAP, WORDS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUDGET_S = 540.0  # of all parts together
END_S = 10.0  # what a part that is being ended has left
PASSED, FAILED, TIMED_OUT, ABSENT = "passed", "FAILED", "OUT OF TIME", "not here"
TESTS = ("tests/torch/test_gpu.py", "tests/torch/test_gpu_features.py", "tests/keras/test_torch_on_gpus.py")
TESTS_ON_DOUBLES = ("tests/torch/test_gpu_double.py", "tests/torch/test_gpu_double_features.py")


@dataclass
class Result:
    """What became of a part. figures: what it found; gates: rows with figure, aim, found, holds."""

    status: str = PASSED
    reason: str = ""  # empty: it passed
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    gates: list[dict[str, Any]] = field(default_factory=list)


class Failed(Exception):
    """Ends a part. status: FAILED, TIMED_OUT or ABSENT."""

    def __init__(self, reason: str, status: str = FAILED) -> None:
        super().__init__(reason)
        self.status = status


class Run:
    """One part under way: its commands share its limit and write into its log."""

    def __init__(self, name: str, folder: Path, limit_s: float, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = folder
        self.log = folder / f"{name.replace(' ', '_')}.log"
        self.log.write_text("")
        self._limit_s, self._until = limit_s, time.monotonic() + limit_s

    @property
    def on_doubles(self) -> bool:
        return self.options.doubles is not None

    def environment(self) -> dict[str, str]:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        if self.on_doubles:
            doubles = self.options.doubles.resolve()
            libraries = {"CUDA": "libcuda.so.1", "NCCL": "libnccl.so.2", "NVRTC": "libnvrtc.so.13"}
            env |= {f"HOROCLONE_{name}_LIBRARY": str(doubles / file) for name, file in libraries.items()}
            env |= {"HOROCLONE_KERNEL_CACHE": "off"}
        return env

    def __call__(self, command: Sequence[str | Path], **env: str) -> str:
        """Runs a command to its end and gives its output; Failed where it does not succeed in time."""
        words = [str(word) for word in command]
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(words)}\n")
        begun = self.log.stat().st_size
        left = self._until - time.monotonic()
        with self.log.open("a") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**self.environment(), **env}, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(max(0.1, left))
            except subprocess.TimeoutExpired:
                raise Failed(f"ran for more than {self._limit_s:.0f} s: {words[-1]}", TIMED_OUT) from None
            finally:
                end(process)
        output = self.log.read_text(errors="replace")[begun:]
        if code != 0:
            lines = output.strip().splitlines() or ["(no output)"]
            raise Failed(f"exit code {code}: {lines[-1][:300]}")
        return output


def end(process: subprocess.Popen[bytes]) -> None:
    """The command and all that it has started in its session."""
    for how, limit in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        if process.poll() is not None and how is signal.SIGTERM:
            continue
        try:
            os.killpg(process.pid, how)
            process.wait(limit)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def ranks(count: int, *command: str | Path) -> list[str | Path]:
    """A job of horoclonerun."""
    return [sys.executable, "-m", "horoclone.launch.cli", "-np", str(count), sys.executable, *command]


def torchrun(count: int, *command: str | Path) -> list[str | Path]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(count),
        *rendezvous,
        *command,
    ]


def kind(run: Run) -> list[str]:
    return ["--device", "double"] if run.on_doubles else []


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


# --- the parts -------------------------------------------------------------------------------------------------------


def doctor(run: Run) -> Result:
    """What is installed, then kernels compiled, launched and compared: two ranks that share a GPU."""
    program = "import sys; from horoclone.launch.tool import main; main(['doctor', '--json'])"
    output = run([sys.executable, "-c", program])  # whatever it finds: the kernels below decide
    found = json.loads(output[output.index("{") :]) if "{" in output else {}
    kernels = run.folder / "kernels.json"
    job = ranks(2, HERE / "gpu_programs.py", "kernels", "--json", kernels, *kind(run))
    run(job, HOROCLONE_GPU_OPERATIONS="peers")
    return Result(figures={"doctor": found, **read(kernels)})


def pytest(run: Run, files: Sequence[str]) -> Result:
    there = [file for file in files if (ROOT / file).exists()]
    report = run.folder / f"{run.log.stem}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}", *there]
    reason = ""
    try:
        run([*command, *run.options.tests.split()])
    except Failed as failed:
        if failed.status == TIMED_OUT or not report.exists():
            raise
        reason = str(failed)
    figures = counted(report)
    if figures["failed"]:
        return Result(
            FAILED, f"{len(figures['failed'])} failed, the first {figures['failed'][0]}", figures=figures
        )
    if reason and not reason.startswith("exit code 5:"):  # 5: there was no test to run
        return Result(FAILED, reason, figures=figures)
    if not figures["passed"]:
        why = figures["skipped"][0] if figures["skipped"] else "no such test"
        return Result(ABSENT, f"nothing ran: {why}", figures=figures)
    return Result(figures=figures)


def counted(report: Path) -> dict[str, Any]:
    """Of pytest's report: how many passed, which failed, and why others were skipped."""
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(name)
        elif (skipped := case.find("skipped")) is not None:
            found["skipped"].append(f"{name}: {skipped.get('message')}")
        else:
            found["passed"] += 1
    return found


def tests(run: Run) -> Result:
    return pytest(run, TESTS_ON_DOUBLES if run.on_doubles else TESTS)


def one_rank(run: Run) -> Result:
    """Beside DDP on NCCL, with and without bucket views, eager and captured; what a persistent bucket costs."""
    path = run.folder / "one_rank.json"
    small = [
        "--model",
        "tiny",
        "--batch-size",
        "4",
        "--rounds",
        "2",
        "--steps",
        "2",
        "--bucket-bytes",
        "65536",
    ]
    sizes = [*small, *kind(run)] if run.on_doubles else ["--graphs", "--rounds", "11"]
    run([sys.executable, HERE / "gpu.py", *sizes, "--buckets", "16", "--json", path])
    found = read(path)
    return Result(figures=found, gates=found.get("gates", []))


def shared_gpu(run: Run) -> Result:
    """Two ranks on one GPU through memory that both map, beside gloo."""
    path = run.folder / "two_ranks.json"
    sizes = ["65536"] if run.on_doubles else ["1048576", "67108864", "268435456"]
    options = ["--backend", "gloo", "--no-steps", "--rounds", "5", "--steps", "5", "--bytes", *sizes]
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    run(torchrun(2, HERE / "gpu.py", *options, *kind(run), "--json", path), **env)
    found = read(path)
    return Result(figures=found, gates=found.get("gates", []))


def other_frameworks(run: Run) -> Result:
    if run.on_doubles:
        return pytest(run, ("tests/cupy/test_cupy_double.py", "tests/jax/test_gpu_double.py"))
    return pytest(run, ("tests/cupy/test_cupy_double.py", "tests/jax/test_gpu.py"))


def sanitizer() -> str | None:
    """compute-sanitizer on PATH, or from pip's nvidia-cuda-sanitizer-api."""
    found = shutil.which("compute-sanitizer")
    for folder in [*site.getsitepackages(), *sys.path]:
        for path in Path(folder).glob("nvidia/**/bin/compute-sanitizer"):
            found = found or str(path)
    return found


def sanitized(run: Run) -> Result:
    """Our kernels under compute-sanitizer: out of bounds, races, memory that nobody has written."""
    program = sanitizer()
    if run.on_doubles or program is None:
        raise Failed("no compute-sanitizer: pip install nvidia-cuda-sanitizer-api, or CUDA's toolkit", ABSENT)
    done = []
    for tool in ("memcheck", "racecheck", "initcheck"):
        options = ["--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=hc_"]
        command = [
            sys.executable,
            "-m",
            "horoclone.launch.cli",
            "-np",
            "2",
            program,
            *options,
            sys.executable,
        ]
        run([*command, HERE / "gpu_programs.py", "short"], HOROCLONE_GPU_OPERATIONS="peers")
        done.append(tool)
    return Result(figures={"tools": done})


def traced(run: Run) -> Result:
    """A step under torch's profiler: for how much of our kernels' time backward goes on."""
    if run.on_doubles:
        raise Failed("there is no GPU to trace", ABSENT)
    path = run.folder / "trace.json"
    run(ranks(2, HERE / "gpu_programs.py", "trace", "--json", path))
    found = read(path)
    share = found.get("overlap")
    row = {"figure": "our kernels' time in which backward computes", "aim": f">= {OVERLAP:g}", "found": share,
           "holds": None if share is None else share >= OVERLAP}  # fmt: skip
    return Result(figures=found, gates=[row])


def lives(run: Run) -> Result:
    path = run.folder / "lives.json"
    run(ranks(2, HERE / "gpu_programs.py", "lives", "--json", path, *kind(run)))
    return Result(figures=read(path))


def soak(run: Run) -> Result:
    path = run.folder / "soak.json"
    minutes = ["--minutes", str(run.options.minutes)]
    run(ranks(2, HERE / "gpu_programs.py", "soak", "--json", path, *minutes, *kind(run)))
    return Result(figures=read(path))


# Name: what does it, and its limit in seconds.
PARTS: dict[str, tuple[Callable[[Run], Result], float]] = {
    "doctor": (doctor, 60),
    "tests": (tests, 170),
    "one rank": (one_rank, 120),
    "two ranks": (shared_gpu, 60),
    "cupy and jax": (other_frameworks, 90),
    "sanitizer": (sanitized, 60),
    "trace": (traced, 45),
}
LONG: dict[str, tuple[Callable[[Run], Result], float]] = {"lives": (lives, 3000), "soak": (soak, 3600)}


# --- all of them -----------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Result]) -> str:
    """A line for each part, then one for each aim that a part speaks of."""
    lines = [f"{'part':<16}{'verdict':<14}{'seconds':>8}  why"]
    lines += [f"{name:<16}{one.status:<14}{one.seconds:>8.1f}  {one.reason}" for name, one in results.items()]
    rows: dict[str, dict[str, Any]] = {}
    for one in results.values():
        for gate in one.gates:
            if gate["holds"] is not None or gate["figure"] not in rows:
                rows[gate["figure"]] = gate
    lines += ["", f"{'aim':<58}{'':>8}{'found':>10}"] if rows else []
    for name, gate in rows.items():
        value = "-" if gate["found"] is None else f"{gate['found']:.3f}"
        lines.append(f"{name:<58}{gate['aim']:>8}{value:>10}  {WORDS[gate['holds']]}")
    return "\n".join(lines)


def write(results: Mapping[str, Result], options: argparse.Namespace) -> None:
    name = "gpu-long" if options.long else "gpu"
    everything = {part: asdict(one) for part, one in results.items()}
    (options.out / f"{name}.json").write_text(json.dumps(everything, indent=1))
    (options.out / f"{name}.txt").write_text(table(results) + "\n")


def run_part(
    name: str, part: tuple[Callable[[Run], Result], float], left_s: float, options: argparse.Namespace
) -> Result:
    does, limit_s = part
    if left_s < END_S:
        return Result(TIMED_OUT, "not begun: the time of all parts is over")
    began = time.monotonic()
    try:
        result = does(Run(name, options.out / "gpu", min(limit_s, left_s), options))
    except Failed as failed:
        result = Result(failed.status, str(failed))
    except Exception as error:  # whatever it is, the other parts go on
        result = Result(FAILED, f"{type(error).__name__}: {error}")
    result.seconds = time.monotonic() - began
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0: no part failed and no aim was missed; 1 otherwise. What is not here fails nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of results (out)")
    parser.add_argument("--parts", help="some of them, with commas between: " + ", ".join([*PARTS, *LONG]))
    parser.add_argument("--long", action="store_true", help="the 1,000 lives and the soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the soak")
    parser.add_argument("--budget", type=float, help=f"seconds for all parts ({BUDGET_S:.0f}; --long: none)")
    parser.add_argument(
        "--budget-from-start", type=float, default=0, help="seconds of it that are gone already"
    )
    parser.add_argument("--tests", default="", help="more options for pytest")
    parser.add_argument("--doubles", type=Path, help="folder of the doubles of CUDA, NCCL and NVRTC")
    options = parser.parse_args(argv)
    parts = LONG if options.long else PARTS
    chosen = options.parts.split(",") if options.parts else list(parts)
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"no part {unknown[0]!r}")
    budget = options.budget or (float("inf") if options.long else BUDGET_S - options.budget_from_start)
    (options.out / "gpu").mkdir(parents=True, exist_ok=True)
    until, results = time.monotonic() + budget, {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in chosen:
        print(f"=== {name}", flush=True)
        results[name] = run_part(name, parts[name], until - time.monotonic(), options)
        write(results, options)
        print(
            f"{results[name].status} after {results[name].seconds:.1f} s  {results[name].reason}", flush=True
        )
    print(f"\n{table(results)}\n\nin {options.out}: gpu.json, gpu.txt, gpu/")
    bad = any(
        one.status in (FAILED, TIMED_OUT) or any(g["holds"] is False for g in one.gates)
        for one in results.values()
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
