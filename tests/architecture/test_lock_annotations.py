"""Which lock guards what stands in the sources and is checked: `.ci/locks` asks clang about all of the core."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# The bindings' own libraries see horoclone.h alone.
WITH_LOCKS_OF_STD = ("base/mutex.h", "frameworks/", "python/", "tests/", "tools/python/")

CLASS = """
#include "base/mutex.h"
class Counter {
 public:
  void add() { %s ++n_; }
  void wait(hc::CondVar& changed) {
    hc::MutexLock lock(mutex_);
    changed.wait(mutex_, [&] { mutex_.assume_held(); return n_ > 0; });
  }
 private:
  hc::Mutex mutex_;
  int n_ HC_GUARDED_BY(mutex_) = 0;
};
void use(Counter& counter, hc::CondVar& changed) { counter.add(); counter.wait(changed); }
"""


def test_the_core_locks_with_annotated_mutexes_only() -> None:
    plain = re.compile(
        r"std::(recursive_|shared_)?mutex|std::condition_variable|std::(lock_guard|unique_lock|scoped_lock)"
    )
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in (".h", ".cc")
        and not path.relative_to(CSRC).as_posix().startswith(WITH_LOCKS_OF_STD)
        and plain.search(path.read_text())
    ]
    assert not wrong, f"use Mutex, MutexLock and CondVar of base/mutex.h: {wrong}"


@pytest.mark.parametrize("lock, refused", [("hc::MutexLock lock(mutex_);", False), ("", True)])
def test_a_field_without_its_lock_is_refused(tmp_path: Path, lock: str, refused: bool) -> None:
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("clang++ is not installed (apt-get install clang)")
    source = tmp_path / "counter.cc"
    source.write_text(CLASS % lock)
    options = ["-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety", f"-I{CSRC}"]
    done = subprocess.run([clang, *options, str(source)], capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) == refused, done.stderr
    assert ("requires holding mutex 'mutex_'" in done.stderr) == refused, done.stderr
