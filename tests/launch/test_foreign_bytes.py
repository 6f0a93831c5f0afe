"""Arguments, paths and variables that are not UTF-8 go through the launcher, the core and the views as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HOROCLONERUN = os.fsencode(Path(sys.executable).with_name("horoclonerun"))
PYTHON = os.fsencode(sys.executable)
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = b"""
import os, sys
import numpy as np
import horoclone as hvd
hvd.init()
x = hvd.allreduce(np.ones(3), op=hvd.Sum, name="x")
print("sum", x.tolist(), os.fsencode(sys.argv[1]), os.fsencode(os.environ["FOREIGN"]), os.getcwdb()[-3:], flush=True)
if "fail" in sys.argv:
    open("no\\udcfffile")
hvd.shutdown()
"""


def run(
    tmp_path: Path, *words: bytes, env: dict[bytes, bytes] | None = None
) -> subprocess.CompletedProcess[bytes]:
    folder = os.fsencode(tmp_path) + b"/w\xff\xfe"
    os.makedirs(folder, exist_ok=True)
    script = folder + b"/tr\xe4in.py"
    with open(script, "wb") as file:
        file.write(PROGRAM)
    environ = {**os.environb, b"PYTHONPATH": os.fsencode(ROOT), b"FOREIGN": b"\xfc\x80", **(env or {})}
    command = [
        HOROCLONERUN, b"-np", b"2", b"--dashboard", b"--metrics-port", b"0", PYTHON, script, b"a\xffb", *words
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=100)


def test_they_reach_the_ranks_and_the_files_of_the_core_unchanged(tmp_path: Path) -> None:
    timeline, records = os.fsencode(tmp_path) + b"/t\xffl.json", os.fsencode(tmp_path) + b"/r\xff"
    files = {b"HOROCLONE_TIMELINE": timeline, b"HOROCLONE_RECORDER_DIR": records, b"HOROCLONE_NODE": b"n\xff"}
    done = run(tmp_path, env=files)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    line = b"sum [2.0, 2.0, 2.0] b'a\\xffb' b'\\xfc\\x80' b'w\\xff\\xfe'"
    assert done.stdout.count(line) == 2, done.stdout
    with open(timeline, "rb") as file:
        assert any(event.get("name") == "ALLREDUCE" or "x" in str(event) for event in json.loads(file.read()))


def test_what_a_rank_says_of_them_is_the_reported_cause(tmp_path: Path) -> None:
    done = run(tmp_path, b"fail")
    assert done.returncode != 0
    last = done.stderr.strip().rpartition(b"root cause: ")[2]
    assert b"FileNotFoundError" in last and b"no\\udcfffile" in last, done.stderr


def test_a_setting_that_is_wrong_in_this_way_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, env={b"HOROCLONE_ARENA_BYTES": b"1\xff"})
    assert done.returncode != 0
    assert b"ARENA_BYTES" in done.stderr.rpartition(b"root cause: ")[2], done.stderr
