"""Plants one fault after another in a copy of the tree, and says which of the tests that shall catch it did.

By hand: `python tests/planted_faults.py` for all, or with numbers (`3 17`), `python` or `cpp`. The copy is build/planted, whose
C++ is built by .ci/cpp as for `make check`. Exit code 1 where a fault was not caught, or is no longer in the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "planted"
LIMIT_S = 900  # of one test on a busy machine; what hangs has caught the fault as well


class Fault(NamedTuple):
    """One line as it is, and as it would be wrong. `test`: a pytest argument, or a folder of csrc/tests and a case."""

    file: str
    before: str
    after: str
    test: str


PYTHON = (
    Fault("horoclone/launch/hosts.py", "slots.get(host.name, 0) + host.slots", "host.slots", "tests/launch/test_hosts.py"),
    Fault("horoclone/launch/discovery.py", "if code != 0:", "if code < 0:", "tests/launch/test_discovery.py"),
    Fault("horoclone/launch/root_cause.py", "return sorted(late - ready)", "return sorted(late)", "tests/launch/test_hosts.py"),
    Fault("horoclone/launch/elastic_policy.py", "lower * 2.0 ** min(count, 32)", "lower * 2.0", "tests/launch/test_elastic_policy.py"),
    Fault("horoclone/bootstrap/wire.py", "if not (hmac.compare_digest(hello[-PROOF_BYTES:], expected) and hello.startswith(HELLO)):", "if not hello.startswith(HELLO):", "tests/bootstrap/test_replica.py"),
    Fault("horoclone/bootstrap/rendezvous.py", "right = hmac.compare_digest(hello[-wire.PROOF_BYTES :], expected)", "right = True", "tests/bootstrap/test_rendezvous.py"),
    Fault("horoclone/membership/coordinator.py", "if self.finishing and not member.generation:", "if False:", "tests/membership/test_coordinator.py"),
    Fault("horoclone/membership/decision.py", "if not job.votes(here)[2]:", "if False:", "tests/membership/test_states.py"),
    Fault("horoclone/elastic/sampler.py", "self.processed_num += batch_size * self.num_replicas", "self.processed_num += batch_size", "tests/elastic/training/test_sampler.py"),
    Fault("horoclone/checkpoint/files.py", "if check.text() != written.digest:", "if False:", "tests/checkpoint/test_files.py"),
    Fault("horoclone/checkpoint/files.py", '_digest_of(whole["content"]) != whole.get("sha256")', "False", "tests/checkpoint/test_files.py"),
    Fault("horoclone/compression.py", "return cls.cast(tensor, ctx)", "return tensor", "tests/jax/test_operations.py"),
    Fault("horoclone/torch/operations/gradients.py", "return scale * ((group.size() or 1) if op == Sum else 1)", "return scale", "tests/torch/test_second_derivatives.py"),
    Fault("horoclone/torch/operations/functional.py", "rows // size + (rank < rows % size)", "rows // size", "tests/torch/test_compile.py"),
    Fault("horoclone/jax/optimizer.py", '"postscale_factor": gradient_predivide_factor,', '"postscale_factor": 1.0,', "tests/jax/test_optimizer.py"),
    Fault("horoclone/jax/optimizer.py", "(state.passes + 1) % passes == 0", "state.passes % passes == 0", "tests/jax/test_optimizer.py"),
    Fault("horoclone/jax/weighted.py", "(own != 0) | jnp.isfinite(product)", "own != -1", "tests/jax/test_jax_weighted.py"),
    Fault("horoclone/plan/costs.py", '(1 if unit == "gbit" else 1000)', '(1 if unit == "gbit" else 1024)', "tests/plan/test_strategies.py"),
    Fault("horoclone/live/exposition.py", "itertools.accumulate(one.histogram)", "one.histogram", "tests/live/test_views.py"),
    Fault("horoclone/ps/optimizers.py", "beta1=self.betas[0], beta2=self.betas[1]", "beta1=self.betas[1], beta2=self.betas[0]", "tests/ps/test_table.py"),
)  # fmt: skip
CPP = (
    Fault("csrc/base/wire.h", "bytes > limit || bytes > rest_.size()", "bytes > rest_.size()", "base *longer than the frame*"),
    Fault("csrc/base/half.h", "bits + 0x7fffu + odd", "bits + 0x8000u", "base *rounds to the nearest*"),
    Fault("csrc/base/sha256.h", "0x6a09e667", "0x6a09e668", "base sha256*"),
    Fault("csrc/agreement/plan_cache.cc", "return cache_id.announced && cache_id.signature == request.signature ? number : kNoCacheId;", "return cache_id.announced ? number : kNoCacheId;", "agreement plan cache*"),
    Fault("csrc/agreement/coordinator.cc", "if (list.size() < 2 ||", "if (list.size() < 3 ||", "agreement negotiation: random schedules*"),
    Fault("csrc/agreement/coordinator.cc", "if (next.is_join()) break;", "if (false) break;", "agreement coordinator: join*"),
    Fault("csrc/collective/selection.cc", "if (bytes < t.ring_from_bytes) return Algorithm::kRecursiveDoubling;", "if (bytes <= t.ring_from_bytes) return Algorithm::kRecursiveDoubling;", "collective selection*"),
    Fault("csrc/collective/channels/schedule.cc", "if (!sent_[k].empty()) land.after[0] = sent_[k][run++];", "", "collective every allreduce schedule*"),
    Fault("csrc/collective/selection.cc", "std::min(kBypassBytes, ranks == 2 ? 4 * flat_bytes : flat_bytes);", "std::min(kBypassBytes, flat_bytes);", "collective selection*"),
    Fault("csrc/net/framed_channel.cc", "if (frame.empty() || frame.size() > kMaxControlBytes) {", "if (frame.empty()) {", "net channel*"),
    Fault("csrc/net/framed_channel.cc", "if (goodbye_ && !stranded_ && !inbox_.waiting()) return Status::ok();", "if (goodbye_ && !stranded_) return Status::ok();", "net *channel*"),
    Fault("csrc/server/table.cc", "return static_cast<uint32_t>(shard * partitions >> 16);", "return static_cast<uint32_t>(shard * partitions >> 17);", "server partitions*"),
    Fault("csrc/server/table.cc", "if (workers < 1) return", "if (workers < 0) return", "server a table whose*"),
    Fault("csrc/arithmetic/quantize_kernels.h", "scale /= 127.0f", "scale /= 126.0f", "arithmetic quantize*"),
)  # fmt: skip
FAULTS = [*PYTHON, *CPP]


def run(command: list[str], **environment: str) -> tuple[int, str]:
    # Without the tree that this program runs from, and with the copy before everything that is installed.
    env = {**os.environ, "PYTHONPATH": str(COPY), "HOROCLONE_TEST_BODY_S": "120", **environment}
    try:
        done = subprocess.run(command, cwd=COPY, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        return 124, f"{error}"
    return done.returncode, done.stdout + done.stderr


def try_python(test: str) -> str | None:
    """What failed; None: nothing."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--long-s", "0", *test.split()
    ]  # fmt: skip
    code, said = run(command)
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"exit code {code}: {said[-300:]}"])[0] if code else None


def try_cpp(test: str) -> str | None:
    folder, case = test.split(" ", 1)
    options = f"-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DHC_PYTHON=ON -DPython_EXECUTABLE={sys.executable}"
    code, said = run(
        [".ci/cpp", "check", "", os.environ.get("JOBS", str(os.cpu_count())), "build"],
        OPTIONS=options, TARGETS=f"hc_tests_{folder}", CCACHE_BASEDIR=str(COPY),
    )  # fmt: skip
    if code:
        sys.exit(f"the fault does not compile: {said[-2000:]}")
    code, said = run([f"build/check/hc_tests_{folder}", f"--test-case={case}"])
    failed = [line.split("TEST CASE:")[1].strip() for line in said.splitlines() if "TEST CASE:" in line]
    return (failed or [f"exit code {code}"])[0] if code else None


def main(chosen: list[str]) -> int:
    numbers = [
        number
        for number, fault in enumerate(FAULTS, 1)
        if not chosen or str(number) in chosen or ("python" if fault in PYTHON else "cpp") in chosen
    ]
    kept = shutil.ignore_patterns(".git", "build", ".venv", "__pycache__", "*_cache", "out")
    if not COPY.exists():
        shutil.copytree(ROOT, COPY, ignore=kept)
    bad = 0
    for number in numbers:
        fault = FAULTS[number - 1]
        path, source = COPY / fault.file, (ROOT / fault.file).read_text()
        if fault.before not in source:
            print(f"{number:2} STALE   {fault.file}: {fault.before!r} is not there", flush=True)
            bad += 1
            continue
        path.write_text(source.replace(fault.before, fault.after, 1))
        began = time.monotonic()
        try:
            caught = (try_python if fault in PYTHON else try_cpp)(fault.test)
        finally:
            path.write_text(source)
        bad += caught is None
        verdict = f"caught  {fault.file}: {caught}" if caught else f"MISSED  {fault.file}: by {fault.test}"
        print(f"{number:2} {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
