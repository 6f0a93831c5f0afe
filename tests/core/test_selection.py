"""Which algorithm runs: what init measures is remembered for the next one, and `horoclone doctor` prints the table."""

from __future__ import annotations

import json
import sys

import pytest

from horoclone import selection

RANK = """
import json
import horoclone as hvd
from horoclone.runtime import native
for life in range(2):
    hvd.init()
    found = json.loads(native().counters())
    print(f"life {life} rank {hvd.rank()}: {found['selection']} {found['autotune']['flat_bytes']}", flush=True)
    hvd.shutdown()
"""


def ranks(text: str) -> list[str]:
    return sorted(line.partition("life")[2] for line in text.splitlines() if "life" in line)


def test_the_first_init_measures_and_later_ones_remember(launch, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, str(program)]
    env = {"XDG_CACHE_HOME": str(tmp_path), "HOROCLONE_SELECTION": ""}
    first = ranks(launch(command, env=env).stdout)
    assert len(first) == 4 and all("probe" in line for line in first[:2]), first
    ((key, flat_bytes),) = json.loads((tmp_path / "horoclone" / "selection.json").read_text()).items()
    assert key.endswith("2 ranks on one node") and flat_bytes in (4096, 8192, 16384, 32768)
    again = [f"given {flat_bytes}"] * 2
    assert [line.partition(": ")[2] for line in first[2:]] == again, first  # the same processes
    second = ranks(launch(command, env=env).stdout)
    assert [line.partition(": ")[2] for line in second] == again * 2, second  # new ones
    doctor = launch([sys.executable, "-m", "horoclone.launch.tool", "doctor", "--json"], env=env, check=False)
    findings = {f["topic"]: f["text"] for f in json.loads(doctor.stdout)["findings"]}
    assert "shm blocks from 16 KiB; alltoall: shm blocks" in findings["algorithms, one node"]
    assert "circulant from 64 KiB, ring from 128 KiB" in findings["algorithms, 8 nodes"]
    assert "two level from 8 KiB" in findings["algorithms, 8 nodes of several ranks"]
    assert findings["measured"] == f"{key}: shm flat up to {flat_bytes // 1024} KiB"


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": "b"}', '{"KEY": -1}', '{"KEY": 1000000}', '{"KEY": null}']
)
def test_a_damaged_memory_is_none(tmp_path, monkeypatch, content):
    monkeypatch.setattr(selection, "_found", {})
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    file = selection.cache_file(environ)
    file.parent.mkdir()
    file.write_text(content.replace("KEY", selection.key_of(2)))
    assert selection.with_remembered({}, environ, 2) == {}
    selection.remember(environ, selection.key_of(2), 8192)
    assert selection.with_remembered({}, environ, 2) == {"HOROCLONE_SELECTION": "flat_bytes=8192"}
    assert selection.with_remembered({}, environ, 3) == {}
    for chosen in ({"HOROCLONE_SELECTION": "fixed"}, {"HOROCLONE_FLAT_BYTES": "64"}):
        assert selection.with_remembered(chosen, environ, 2) == chosen
    assert json.loads(file.read_text()) == {selection.key_of(2): 8192}
    assert [one.name for one in file.parent.iterdir()] == ["selection.json"]


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_memory(monkeypatch):
    monkeypatch.setattr(selection, "_found", {})
    environ = {"XDG_CACHE_HOME": "/proc/none"}
    selection.remember(environ, selection.key_of(2), 4096)
    assert selection.remembered(environ) == {selection.key_of(2): 4096}
