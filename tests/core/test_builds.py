"""Ranks of two builds of horoclone: neither reads what the other writes, and both say which two they are."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

core = pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

RANK = """
import os, sys
if os.environ["HOROVOD_RANK"] == "1":
    sys.path.insert(0, sys.argv[1])
import horoclone as hvd
try:
    hvd.init()
    print("connected")
except hvd.HorovodInternalError as error:
    os.write(1, f"refused {os.environ['HOROVOD_RANK']} {type(error).__name__} {error}\\n".encode())
"""


def test_the_build_names_the_version_and_a_digest():
    import horoclone

    version, _, digest = json.loads(core.build_info())["build"].partition("+")
    assert version == horoclone.__version__ and len(digest) == 12 and int(digest, 16) >= 0


def test_ranks_of_two_builds_refuse_each_other_and_both_name_both(launch, tmp_path):
    build = json.loads(core.build_info())["build"]
    other = build[:-6] + ("abcdef" if build[-6:] != "abcdef" else "fedcba")
    package = Path(core.__file__).parent
    shutil.copytree(package, tmp_path / "horoclone", ignore=shutil.ignore_patterns("__pycache__"))
    library = tmp_path / "horoclone" / "libhoroclone.so"
    content = library.read_bytes()
    assert content.count(build.encode() + b"\0") == 1
    library.write_bytes(content.replace(build.encode(), other.encode()))
    command = [
        sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, "-c", RANK, str(tmp_path)
    ]  # fmt: skip
    done = launch(command, check=False, env=dict(os.environ))
    words = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    refused = sorted(line for line in words if line.startswith("refused"))
    assert len(refused) == 2 and "connected" not in done.stdout, done.output
    for rank, (own, theirs) in enumerate([(build, other), (other, build)]):
        assert refused[rank].startswith(f"refused {rank} Unsupported the endpoint of rank {1 - rank}: "), (
            done.output
        )
        assert f"the other side is horoclone {theirs}, this one is horoclone {own};" in refused[rank], (
            done.output
        )
