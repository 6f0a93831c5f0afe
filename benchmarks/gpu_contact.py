"""First contact with a GPU: `make gpu`. Parts in order, each with a limit of its own, each writing its results at once.

One GPU is enough; nothing is fetched. A part that fails or runs out of time is named and the rest goes on; out/gpu.json
and out/gpu.txt (a table with a verdict for every part and every aim) are there whatever happens, and out/gpu/ has the
output of each part. --few FOLDER also puts all of that there in three files, after each part. Instead of the first
parts, --second has those that can wait for a second command, and --long the 1,000 lives and the soak. --fakes FOLDER
tries all of it without a GPU, on the fakes of the tests: then no figure means anything.

The first question is whether the machine code of our kernels is right, then whether NCCL is used rightly: several ranks
on one GPU run NCCL's kernels where each is a host of its own to it (NCCL_HOSTID), by sockets and in turns. What that
costs says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_figures import OVERLAP, WORDS
from gpu_reports import counted, first_object, told

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUDGET_S = 540.0  # of all parts together
END_S = 10.0  # what a part that is being ended has left
SHOWN = 1500  # characters: the end of its log, which is printed where a part fails
PASSED, FAILED, TIMED_OUT, ABSENT = "passed", "FAILED", "OUT OF TIME", "not here"
STAND_IN_SANITIZER = ROOT / "tests" / "fakes" / "compute_sanitizer.py"
# NCCL takes ranks on one GPU if each is a host of its own to it, which gpu_place.py and tests/torch/test_gpu.py see to.
AS_HOSTS = {
    "HC_RANKS_ARE_NCCL_HOSTS": "1", "HOROCLONE_GPU_OPERATIONS": "nccl", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_DEBUG": "WARN",
}  # fmt: skip
NOTICED_S = 10.0  # until those who wait for a rank that was killed have an error, and their streams go on
# No test that is for the fakes: minutes of a GPU are not spent on them.
TESTS = ("tests/torch/test_gpu.py",)
TESTS_OF_FEATURES = (
    "tests/torch/test_gpu_features.py",
    "tests/keras/test_torch_on_gpus.py::test_keras_on_torch_trains_on_real_gpus_as_on_the_host",
)
TESTS_ON_FAKES = ("tests/torch/test_gpu_fake.py", "tests/torch/test_gpu_fake_features.py")
OTHERS = {
    "cupy": ("tests/cupy/test_cupy_fake.py::test_cupy_arrays_on_real_gpus",),
    "jax": ("tests/jax/test_gpu.py",),
}
OTHERS_ON_FAKES = {"cupy": ("tests/cupy/test_cupy_fake.py",), "jax": ("tests/jax/test_gpu_fake.py",)}


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
        self.name = name
        self.log = folder / f"{name.replace(' ', '_')}.log"
        self.log.write_text("")
        self._limit_s, self._until = limit_s, time.monotonic() + limit_s

    def beside(self, name: str) -> Run:
        """For a command that runs beside others of the part: a log of its own, and the limit of the part."""
        other = Run(f"{self.name} {name}", self.folder, self._limit_s, self.options)
        other._until = self._until
        return other

    @property
    def on_fakes(self) -> bool:
        return self.options.fakes is not None

    def environment(self) -> dict[str, str]:
        env = {
            **os.environ,
            # A test that hangs leaves time for the others.
            "HOROCLONE_TEST_BODY_S": "30",
            # Without a network torch and gloo ask in vain for names of this host: then not for ten seconds each time.
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        if self.on_fakes:
            fakes = self.options.fakes.resolve()
            libraries = {"CUDA": "libcuda.so.1", "NCCL": "libnccl.so.2", "NVRTC": "libnvrtc.so.13"}
            env |= {f"HOROCLONE_{name}_LIBRARY": str(fakes / file) for name, file in libraries.items()}
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
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *rendezvous, *command,
    ]  # fmt: skip


def kind(run: Run) -> list[str]:
    return ["--device", "fake"] if run.on_fakes else []


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


# --- the parts -------------------------------------------------------------------------------------------------------


def kernels(run: Run) -> Result:
    """Every kernel of ours in one process, to the bit, and its speed beside the driver's copy."""
    path = run.folder / "kernels.json"
    sizes = ["--largest", "4096"] if run.on_fakes else []
    run([sys.executable, HERE / "gpu_kernels.py", "--json", path, *sizes])
    return Result(figures=read(path))


def doctor(run: Run) -> Result:
    """What is installed, then kernels compiled, launched and compared: two ranks that share a GPU."""
    program = "import sys; from horoclone.launch.tool import main; main(['doctor', '--json'])"
    found = first_object(run([sys.executable, "-c", program]))  # whatever it finds: the kernels below decide
    sums = run.folder / "sums.json"
    job = ranks(2, HERE / "gpu_programs.py", "sums", "--json", sums, *kind(run))
    run(job, HOROCLONE_GPU_OPERATIONS="peers")
    return Result(figures={"doctor": found, **read(sums)})


def pytest(run: Run, files: Sequence[str], **env: str) -> Result:
    there = [file for file in files if (ROOT / file.split("::")[0]).exists()]
    report = run.folder / f"{run.log.stem}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", f"--junitxml={report}", *there]
    reason = ""
    try:
        run([*command, *shlex.split(run.options.tests)], **env)
    except Failed as failed:
        if failed.status == TIMED_OUT:
            figures = told(run.log.read_text(errors="replace"))
            count = f"{figures['passed']} tests had passed, {len(figures['failed'])} failed"
            return Result(TIMED_OUT, f"{failed}; {count}", figures=figures)
        if not report.exists():
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


def nccl(run: Run) -> Result:
    """Sums by NCCL, which says yes or no within seconds; then the tests."""
    path = run.folder / "nccl_sums.json"
    run(ranks(2, HERE / "gpu_programs.py", "sums", "--json", path, *kind(run)), **AS_HOSTS)
    # The fakes of the tests have a GPU for each rank.
    result = pytest(run, TESTS_ON_FAKES[:1]) if run.on_fakes else pytest(run, TESTS, **AS_HOSTS)
    result.figures["sums"] = read(path)
    return result


def death(run: Run, **env: str) -> dict[str, Any]:
    """Of three ranks the second is killed: what the others say of it."""
    path = run.folder / f"{run.log.stem}.json"
    for rank in (0, 2):
        path.with_suffix(f".{rank}.json").unlink(missing_ok=True)
    try:
        run(ranks(3, HERE / "gpu_programs.py", "death", "--json", path, *kind(run)), **env)
    except Failed as failed:  # as it must
        if failed.status == TIMED_OUT:
            raise
    found = {f"rank {rank}": read(path.with_suffix(f".{rank}.json")) for rank in (0, 2)}
    for name, one in found.items():
        if not one:
            raise Failed(f"{name} has not come to its end after rank 1 was killed")
        if not one["names rank 1"] or one["goes on after s"] > NOTICED_S:
            raise Failed(f"{name} after rank 1 was killed: {one}")
    return found


def ends(run: Run) -> Result:
    """NCCL's communicators when a rank dies under them, and when they come and go."""
    found: dict[str, Any] = {"death": death(run, **AS_HOSTS)}
    path = run.folder / "few_lives.json"
    run(ranks(2, HERE / "gpu_programs.py", "lives", "--lives", "20", "--json", path, *kind(run)), **AS_HOSTS)
    return Result(figures={**found, "lives": read(path)})


def nccl_buckets(run: Run) -> Result:
    """Two ranks by NCCL beside DDP: what a bucket costs the host. What a step takes says nothing here."""
    path = run.folder / "nccl_buckets.json"
    options = ["--model", "tiny", "--batch-size", "4", "--buckets", "16", "--rounds", "5"]
    options += ["--backend", "gloo" if run.on_fakes else "nccl", "--steps", "2", "--bucket-bytes", "65536"]
    run(torchrun(2, HERE / "gpu.py", *options, *kind(run), "--json", path), **AS_HOSTS)
    found = read(path)
    return Result(figures={"buckets": found.get("buckets"), "facts": found.get("facts")})


def features(run: Run) -> Result:
    """Torch's features, by peers where ranks share a GPU."""
    return pytest(run, TESTS_ON_FAKES[1:] if run.on_fakes else TESTS_OF_FEATURES)


def peers(run: Run) -> Result:
    """Two ranks that map each other's memory: the tests, a rank that dies, memory that goes right behind a step."""
    path = run.folder / "drops.json"
    result = pytest(run, TESTS_ON_FAKES[:1] if run.on_fakes else TESTS)
    result.figures["death"] = death(run, HOROCLONE_GPU_OPERATIONS="peers")
    for env in ({"HOROCLONE_GPU_OPERATIONS": "peers"}, AS_HOSTS):
        run(ranks(2, HERE / "gpu_programs.py", "drops", "--json", path, *kind(run)), **env)
    return result


def one_rank(run: Run) -> Result:
    """Beside DDP on NCCL, with and without bucket views, eager and captured; what a persistent bucket costs."""
    path = run.folder / "one_rank.json"
    small = [
        "--model", "tiny", "--batch-size", "4", "--rounds", "2", "--steps", "2", "--bucket-bytes", "65536",
    ]  # fmt: skip
    sizes = [*small, *kind(run)] if run.on_fakes else ["--graphs", "--rounds", "5"]
    run([sys.executable, HERE / "gpu.py", *sizes, "--buckets", "16", "--json", path])
    found = read(path)
    return Result(figures=found, gates=found.get("gates", []))


def shared_gpu(run: Run) -> Result:
    """Two ranks on one GPU through memory that both map, beside gloo."""
    path = run.folder / "two_ranks.json"
    sizes = ["65536"] if run.on_fakes else ["1048576", "67108864", "268435456"]
    options = ["--backend", "gloo", "--no-steps", "--rounds", "5", "--steps", "5", "--bytes", *sizes]
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    run(torchrun(2, HERE / "gpu.py", *options, *kind(run), "--json", path), **env)
    found = read(path)
    return Result(figures=found, gates=found.get("gates", []))


def other_frameworks(run: Run) -> Result:
    """CuPy's tests beside JAX's, whose programs take their time to be compiled."""
    files = OTHERS_ON_FAKES if run.on_fakes else OTHERS
    with ThreadPoolExecutor(len(files)) as at_once:
        found = dict(
            zip(files, at_once.map(lambda name: pytest(run.beside(name), files[name]), files), strict=True)
        )
    figures = {name: one.figures for name, one in found.items()}
    for status in (FAILED, TIMED_OUT):
        if wrong := {name: one for name, one in found.items() if one.status == status}:
            return Result(
                status, "; ".join(f"{name}: {one.reason}" for name, one in wrong.items()), figures=figures
            )
    absent = "; ".join(f"{name}: {one.reason}" for name, one in found.items() if one.status == ABSENT)
    return Result(
        ABSENT if all(one.status == ABSENT for one in found.values()) else PASSED, absent, figures=figures
    )


def sanitizer() -> list[str | Path]:
    """compute-sanitizer on PATH or beside nvcc; empty: none. Pip's package of that name lacks what starts a program."""
    nvcc = shutil.which("nvcc")
    beside = str(Path(nvcc).resolve().parent) if nvcc else None
    found = shutil.which("compute-sanitizer") or (beside and shutil.which("compute-sanitizer", path=beside))
    return [found] if found else []


def sanitizing(program: Sequence[str | Path], tool: str) -> list[str | Path]:
    """What stands before the command whose kernels `tool` looks at.

    Only our kernels, and no call of the driver: torch asks for things that a driver need not have, which would count as
    errors. Only the rank itself, and not what it starts. However long the rank takes until it uses the GPU.
    """
    options = [
        "--kernel-name", "kns=hc_", "--report-api-errors", "no", "--target-processes", "application-only",
    ]  # fmt: skip
    return [*program, "--tool", tool, *options, "--launch-timeout", "0", *GATE_OF_TOOL[tool]]


# Whether what a tool finds is an error. Not so initcheck's: it does not see what the other rank writes into memory that
# both map, nor does anybody write the gaps between packed tensors, which are reduced with them.
GATE_OF_TOOL: dict[str, list[str | Path]] = {"memcheck": ["--error-exitcode", "9"], "initcheck": []}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def sanitized(run: Run) -> Result:
    """Our kernels under compute-sanitizer: what lies out of bounds, and reads of what nobody has written; at once.

    They use no shared memory and no barrier, so racecheck and synccheck would look at nothing.
    """
    program: list[str | Path] = [sys.executable, STAND_IN_SANITIZER] if run.on_fakes else sanitizer()
    if not program:
        raise Failed("no compute-sanitizer, which is part of CUDA's toolkit", ABSENT)

    def one(tool: str) -> dict[str, Any]:
        # Not by horoclonerun: what stands between it and the rank would have to pass on an open descriptor.
        short: list[str | Path] = [sys.executable, HERE / "gpu_programs.py", "short", *kind(run)]
        job = torchrun(2, "--no-python", *sanitizing(program, tool), *short)
        output = run.beside(tool)(job, HOROCLONE_GPU_OPERATIONS="peers")
        return {"errors, by rank": [int(count) for count in SUMMARY.findall(output)]}

    with ThreadPoolExecutor(len(GATE_OF_TOOL)) as at_once:
        found = dict(zip(GATE_OF_TOOL, at_once.map(one, GATE_OF_TOOL), strict=True))
    if silent := [tool for tool, what in found.items() if len(what["errors, by rank"]) != 2]:
        return Result(FAILED, f"{silent[0]} gave no summary for each rank", figures=found)
    if run.on_fakes:
        return Result(ABSENT, "there is no GPU: only the command was tried", figures=found)
    return Result(figures=found)


def traced(run: Run) -> Result:
    """A step under torch's profiler: for how much of our kernels' time backward goes on."""
    path = run.folder / "trace.json"
    run(ranks(2, HERE / "gpu_programs.py", "trace", "--json", path, *kind(run)))
    found = read(path)
    if run.on_fakes:
        return Result(ABSENT, "there is no GPU to trace: only the program was tried", figures=found)
    if not found.get("kernels that communicate"):
        return Result(FAILED, "the trace has no kernel of ours: did the profiler see the GPU?", figures=found)
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
    "kernels": (kernels, 60),
    "doctor": (doctor, 40),
    "nccl": (nccl, 130),
    "ends": (ends, 90),
    "nccl buckets": (nccl_buckets, 45),
    "features": (features, 90),
    "one rank": (one_rank, 80),
    "two ranks": (shared_gpu, 60),
}
SECOND: dict[str, tuple[Callable[[Run], Result], float]] = {
    "peers": (peers, 170),
    "cupy and jax": (other_frameworks, 110),
    "sanitizer": (sanitized, 75),
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
    name = "gpu-long" if options.long else "gpu-second" if options.second else "gpu"
    everything = {part: asdict(one) for part, one in results.items()}
    (options.out / f"{name}.json").write_text(json.dumps(everything, indent=1))
    (options.out / f"{name}.txt").write_text(table(results) + "\n")
    if options.few:
        in_few_files(options.out, name, options.few)


def in_few_files(out: Path, name: str, folder: Path) -> None:
    """The results and gpu.tar.gz with the rest, in a folder that may hold few files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (f"{name}.json", f"{name}.txt"):
            shutil.copy(out / file, folder / file)
        unfinished = out / f".{name}.tar.gz"
        with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
            archive.add(out / "gpu", "gpu")
        shutil.move(unfinished, folder / f"{name}.tar.gz")
    except OSError as error:  # a disk that is full, a process that still writes: the next part goes on
        print(f"{folder} has not got all results: {error}", flush=True)


def run_part(
    name: str, part: tuple[Callable[[Run], Result], float], left_s: float, options: argparse.Namespace
) -> Result:
    does, limit_s = part
    if left_s < END_S:
        return Result(TIMED_OUT, "not begun: the time of all parts is over")
    began = time.monotonic()
    try:
        result = does(Run(name, options.out / "gpu", min(options.patience * limit_s, left_s), options))
    except Failed as failed:
        result = Result(failed.status, str(failed))
    except Exception as error:  # whatever it is, the other parts go on
        result = Result(FAILED, f"{type(error).__name__}: {error}")
    result.seconds = time.monotonic() - began
    return result


def show(name: str, result: Result, folder: Path) -> None:
    """A line; where the part has failed also the end of its logs, in case the files do not come to the reader."""
    print(f"{result.status} after {result.seconds:.1f} s  {result.reason}", flush=True)
    if result.status in (FAILED, TIMED_OUT):
        for log in sorted(folder.glob(f"{name.replace(' ', '_')}*.log")):
            text = log.read_text(errors="replace")[-SHOWN:]
            print(f"... the end of {log}\n{text.rstrip()}\n...", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0: no part failed and no aim was missed; 1 otherwise. What is not here fails nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of results (out)")
    parser.add_argument(
        "--few", type=Path, help="a folder that gets all results in three files, after each part"
    )
    parser.add_argument(
        "--parts", help="some of them, with commas between: " + ", ".join([*PARTS, *SECOND, *LONG])
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--second", action="store_true", help="the parts of a second command")
    which.add_argument("--long", action="store_true", help="the 1,000 lives and the soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the soak")
    parser.add_argument("--budget", type=float, help=f"seconds for all parts ({BUDGET_S:.0f}; --long: none)")
    parser.add_argument(
        "--budget-from-start", type=float, default=0, help="seconds of it that are gone already"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times the limit of each part, where it is slow"
    )
    parser.add_argument("--tests", default="", help="more options for pytest")
    parser.add_argument("--fakes", type=Path, help="folder of the fakes of CUDA, NCCL and NVRTC")
    options = parser.parse_args(argv)
    parts = LONG if options.long else SECOND if options.second else PARTS
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
        show(name, results[name], options.out / "gpu")
    print(f"\n{table(results)}\n\nin {options.out}: gpu.json, gpu.txt, gpu/")
    bad = any(
        one.status in (FAILED, TIMED_OUT) or any(g["holds"] is False for g in one.gates)
        for one in results.values()
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
