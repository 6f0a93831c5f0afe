"""Levels of a machine by socket, NUMA node and cache: read from descriptions of machines that are not here (made with
hwloc, turned into the form of /sys), and ranks that this machine's CPUs are put on sockets for."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import horoclone as hvd
from horoclone import sockets as command
from horoclone.launch import tool

MACHINES = Path(__file__).parent / "machines"
XEONS = "two_sockets_one_cache_each"
EPYCS = "two_sockets_four_nodes_three_caches"
BYTES = 1 << 22


def cpus_of(element: ElementTree.Element) -> list[int]:
    """The CPUs of hwloc's "0xff,0x0f": words of 32 bits, the highest first."""
    words = [int(word or "0", 16) for word in element.attrib["cpuset"].split(",")]
    bits = sum(word << 32 * i for i, word in enumerate(reversed(words)))
    return [cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1]


def describe(
    folder: Path, sockets: list[list[int]], nodes: dict[int, list[int]], caches: list[list[int]]
) -> Path:
    """Writes what the kernel says about these CPUs in /sys/devices/system."""

    def write(name: str, text: object) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def listed(cpus: list[int]) -> str:
        return ",".join(map(str, cpus))

    for number, cpus in enumerate(sockets):
        for cpu in cpus:
            write(f"cpu/cpu{cpu}/topology/physical_package_id", number)
            write(f"cpu/cpu{cpu}/topology/package_cpus_list", listed(cpus))
    for number, cpus in nodes.items():
        write(f"node/node{number}/cpulist", listed(cpus))
    for cpus in caches:
        for cpu in cpus:
            write(f"cpu/cpu{cpu}/cache/index0/level", 3)
            write(f"cpu/cpu{cpu}/cache/index0/shared_cpu_list", listed(cpus))
    return folder


def from_hwloc(folder: Path, name: str) -> tuple[Path, list[list[int]]]:
    """The machine as a folder, and the CPUs of each socket."""
    objects = list(ElementTree.parse(MACHINES / f"{name}.xml").iter("object"))
    found = {
        kind: [o for o in objects if o.attrib["type"] == kind] for kind in ("Package", "NUMANode", "L3Cache")
    }
    sockets = [cpus_of(o) for o in found["Package"]]
    nodes = {int(o.attrib["os_index"]): cpus_of(o) for o in found["NUMANode"]}
    return describe(folder, sockets, nodes, [cpus_of(o) for o in found["L3Cache"]]), sockets


def report(folder: Path, cpus: list[int]) -> dict[str, list[list[int]]]:
    from horoclone import _core

    places = [_core.locality([cpu], str(folder)) for cpu in cpus]
    return dict(json.loads(_core.levels_report(places, BYTES)))


@pytest.mark.parametrize("machine, groups", [(XEONS, [2]), (EPYCS, [24, 8, 2])])
def test_a_machine_of_2_x_96_cores_has_the_levels_that_hwloc_finds(tmp_path, machine, groups):
    folder, sockets = from_hwloc(tmp_path, machine)
    assert [len(cpus) for cpus in sockets] == [96, 96]
    levels = report(folder, [cpu for cpus in sockets for cpu in cpus])["levels"]
    assert [len(set(level)) for level in levels] == groups


def test_a_rank_that_may_run_anywhere_makes_no_levels(tmp_path):
    from horoclone import _core

    folder, sockets = from_hwloc(tmp_path, XEONS)
    anywhere = _core.locality([*sockets[0], *sockets[1]], str(folder))
    assert anywhere == [-1, -1, -1]
    assert _core.locality(sockets[1], str(folder)) == [1, 1, sockets[1][0]]
    places = [_core.locality([cpus[0]], str(folder)) for cpus in sockets] * 4
    assert json.loads(_core.levels_report(places, BYTES))["levels"]
    assert json.loads(_core.levels_report([*places, anywhere], BYTES))["levels"] == []


# ---- this machine's CPUs, each on a socket of its own


def sums(topology: str, cpus: list[int]) -> list[bytes]:
    """What ranks compute, two on each of two CPUs."""
    before = os.sched_getaffinity(0)
    os.environ["HOROCLONE_TOPOLOGY"] = topology
    try:
        os.sched_setaffinity(0, {cpus[int(os.environ["HOROCLONE_RANK"]) // 2 % 2]})
        hvd.init()
        values = []
        for count in (1, 1000, 50_000, 1_000_003):
            own = np.random.default_rng(hvd.rank()).standard_normal(count).astype(np.float32)
            values.append(hvd.allreduce(own, op=hvd.Sum, name=f"sum {count}").tobytes())
            everybody = hvd.allgather(own, name=f"all {count}").reshape(hvd.size(), count)
            for rank in range(hvd.size()):
                assert (
                    everybody[rank, -1]
                    == np.random.default_rng(rank).standard_normal(count).astype(np.float32)[-1]
                )
            sent = hvd.broadcast(own, 3, name=f"from 3 {count}")
            np.testing.assert_array_equal(sent, everybody[3])
        return values
    finally:
        os.sched_setaffinity(0, before)


def in_pairs(count: int) -> bytes:
    """(rank 0 + rank 1) + (rank 2 + rank 3): sums of each socket first."""
    own = [np.random.default_rng(r).standard_normal(count).astype(np.float32) for r in range(4)]
    return bytes(((own[0] + own[1]) + (own[2] + own[3])).tobytes())


@pytest.mark.parametrize("how_many", [1, 2])
def test_ranks_on_two_sockets_sum_each_socket_first_and_on_one_in_rank_order(worlds, tmp_path, how_many):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    each = [[cpu] for cpu in cpus]
    if how_many == 2:
        describe(tmp_path, each, dict(enumerate(each)), each)
    else:
        describe(tmp_path, [cpus], {0: cpus}, each)
    answers = worlds.run(4, sums, init=False, topology=str(tmp_path), cpus=cpus)
    for values in answers:
        assert values == answers[0]
    own = [np.random.default_rng(r).standard_normal(50_000).astype(np.float32) for r in range(4)]
    in_order = (((own[0] + own[1]) + own[2]) + own[3]).tobytes()
    assert in_order != in_pairs(50_000)
    if how_many == 1:
        assert answers[0][2] == in_order
    else:
        assert answers[0] == [in_pairs(count) for count in (1, 1000, 50_000, 1_000_003)]


# ---- the command that prints a table


def core(cpu: int, socket: int) -> command.Core:
    return command.Core(cpu, socket, socket, socket)


def test_ranks_are_spread_over_the_sockets():
    cores = [core(cpu, cpu // 3) for cpu in range(6)]
    assert [one.cpu for one in command.spread(cores, 4)] == [0, 1, 3, 4]
    assert [one.cpu for one in command.spread(cores[:4], 4)] == [0, 1, 2, 3]
    assert [one.cpu for one in command.spread(cores, 3)] == [0, 1, 3]


@pytest.mark.parametrize(
    "cores, expected", [(1, []), (2, [2]), (6, [2, 4, 6]), (192, [2, 4, 8, 16, 32, 64, 128, 192])]
)
def test_ranks_go_up_to_all_cores(cores, expected):
    assert command.counts(cores) == expected


def test_of_each_core_one_cpu_counts(tmp_path):
    folder = describe(tmp_path, [[0, 1, 2, 3]], {0: [0, 1, 2, 3]}, [[0, 1, 2, 3]])
    for cpu in range(4):
        (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert [one.cpu for one in command.cores_of(range(4), str(folder))] == [0, 1]


def test_the_command_prints_a_table_of_a_machine_with_two_sockets(tmp_path, monkeypatch, capsys):
    folder, by_socket = from_hwloc(tmp_path, EPYCS)
    monkeypatch.setenv("HOROCLONE_TOPOLOGY", str(folder))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {cpu for cpus in by_socket for cpu in cpus})
    assert tool.main(["sockets", "--no-times", "--sizes", "1048576", "--ranks", "8,192"]) == 0
    out = capsys.readouterr().out
    assert "192 cores:" in out
    assert "socket 1: 96 cores, NUMA nodes: 4, L3 caches: 12" in out
    assert re.search(r"^ +8 +1048576 +4194304 +1048576$", out, re.MULTILINE), out
    assert re.search(r"^ +192 +1048576 +\d{9} +1048576$", out, re.MULTILINE), out


def test_the_command_measures_with_and_without_levels(tmp_path, monkeypatch, capsys):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    each = [[cpu] for cpu in cpus]
    monkeypatch.setenv("HOROCLONE_TOPOLOGY", str(describe(tmp_path, each, dict(enumerate(each)), each)))
    words = ["sockets", "--rounds", "1", "--seconds", "0.01", "--sizes", "65536", "--ranks", "2"]
    assert tool.main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +2 +65536 +65536 +- +[\d.]+$", out, re.MULTILINE), out  # two ranks make no groups
    monkeypatch.setattr(
        command, "cores_of", lambda *_: [core(cpu, i // 2) for i, cpu in enumerate(sorted([*cpus, *cpus]))]
    )
    assert tool.main([*words[:-1], "4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +4 +65536 +131072 +65536 +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE), out


def test_ranks_that_fail_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(command, "RANK", "raise SystemExit('no memory')")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    assert tool.main(["sockets", "--rounds", "1", "--sizes", "65536", "--ranks", "2"]) == 1
    assert "no memory" in capsys.readouterr().err
