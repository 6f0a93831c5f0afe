"""--host-discovery: hosts of a file, of a Slurm allocation, of a name in DNS; and what the flags make of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from horoclone.launch.config_file import load
from horoclone.launch.discovery import File, Fixed
from horoclone.launch.elastic_options import Elastic, elastic_of
from horoclone.launch.host_sources import Dns, Slurm, expanded, source_of
from horoclone.launch.hosts import Host
from horoclone.launch.options import build_parser
from horoclone.launch.usage import LaunchError

# scontrol as Slurm has it: one name a line for the list that it knows, and its own words for another.
SCONTROL = """#!/bin/sh
test "$1 $2" = "show hostnames" || exit 9
case "$3" in
  'gpu[07-09],login') printf 'gpu07\\ngpu08\\ngpu09\\nlogin\\n' ;;
  *) echo "Invalid hostlist: $3" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scontrol"
    path.write_text(SCONTROL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def flags(*words: str) -> Elastic | None:
    return elastic_of(build_parser("x").parse_args([*words, "true"]), "x")


NODES = {"SLURM_JOB_NODELIST": "gpu[07-09],login"}


def test_counts_of_slurm() -> None:
    assert expanded("2(x3),1") == [2, 2, 2, 1] and expanded("72") == [72]
    assert expanded("2(x3") == [] and expanded("") == []


@pytest.mark.parametrize(
    "environment, slots, counts",
    [
        ({"SLURM_TASKS_PER_NODE": "4(x3),1", "SLURM_JOB_CPUS_PER_NODE": "64(x4)"}, None, [4, 4, 4, 1]),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2),4(x2)"}, None, [8, 8, 4, 4]),
        ({"SLURM_TASKS_PER_NODE": "4(x4)"}, 2, [2, 2, 2, 2]),
    ],
)
def test_nodes_of_an_allocation_with_their_tasks(
    scontrol: None, environment: dict[str, str], slots: int | None, counts: list[int]
) -> None:
    source = Slurm({**NODES, **environment}, slots)
    names = ["gpu07", "gpu08", "gpu09", "login"]
    assert source.find() == [Host(name, count) for name, count in zip(names, counts, strict=True)]
    assert not source.changes


@pytest.mark.parametrize(
    "environment, said",
    [
        ({}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": "x[", "SLURM_TASKS_PER_NODE": "1"}, "Invalid hostlist: x"),
        ({**NODES}, "--slots-per-host N"),
        ({**NODES, "SLURM_TASKS_PER_NODE": "2(x2)"}, "does not fit 4 nodes"),
    ],
)
def test_an_allocation_that_cannot_be_read_says_what_is_wrong(
    scontrol: None, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        Slurm(environment, None).find()


def test_without_scontrol_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="scontrol show hostnames .*No such file"):
        Slurm({**NODES, "SLURM_TASKS_PER_NODE": "1(x4)"}, None).find()


def test_a_job_of_slurm_is_bounded_by_its_allocation(scontrol: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {**NODES, "SLURM_TASKS_PER_NODE": "2(x4)"}.items():
        monkeypatch.setenv(name, text)
    elastic = flags("-np", "auto", "--min-np", "2", "--host-discovery", "slurm")
    assert elastic is not None and isinstance(elastic.source, Fixed) and elastic.size == 8
    with pytest.raises(LaunchError, match="--min-np 9 needs 9 slots, but the hosts have 8"):
        flags("-np", "9", "--host-discovery", "slurm")


def resolver(*answers: object) -> Callable[[str], Iterable[str]]:
    left = list(answers)

    def resolve(name: str) -> Iterable[str]:
        assert name == "workers.jobs"
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, list)
        return answer

    return resolve


def test_addresses_of_a_name_are_hosts_in_an_order_that_does_not_depend_on_the_resolver() -> None:
    first, again = ["10.0.0.9", "10.0.0.10", "fd00::1", "10.0.0.9"], ["10.0.0.10", "fd00::1", "10.0.0.9"]
    source = Dns("workers.jobs", 4, resolver(first, again, ["10.0.0.10"]))
    expected = [Host("10.0.0.9", 4), Host("10.0.0.10", 4), Host("fd00::1", 4)]
    assert source.find() == expected == source.find() and source.find() == [Host("10.0.0.10", 4)]
    assert source.changes


def test_a_name_that_is_not_there_has_no_hosts_and_a_server_that_fails_is_trouble() -> None:
    nobody = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    later = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    source = Dns("workers.jobs", 1, resolver(nobody, later, OSError("no socket")))
    assert source.find() == []
    for said in ("Temporary failure", "no socket"):
        with pytest.raises(LaunchError, match=said):
            source.find()


def test_the_systems_resolver_is_asked() -> None:
    names = [host.name for host in Dns("localhost", 2).find()]
    assert names and set(names) <= {"127.0.0.1", "::1"}


def test_what_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n")
    one = source_of(f"file:{path}", None, {})
    assert isinstance(one, File) and one.find() == [Host("a", 2)]
    for text, slots, expected in (("dns:w:3", None, 3), ("dns:w", 5, 5), ("dns:w", None, 1)):
        source = source_of(text, slots, {})
        assert isinstance(source, Dns) and source._slots == expected
    for text in ("file:", "dns:", "slurm:x", "consul", ""):
        with pytest.raises(LaunchError, match="expected file:PATH, slurm, or dns:NAME"):
            source_of(text, None, {})


def test_the_flag_makes_a_job_elastic_and_goes_with_no_other_list(tmp_path: Path) -> None:
    elastic = flags("-np", "2", "--host-discovery", "dns:workers:2")
    assert elastic is not None and elastic.source.changes and elastic.plan.smallest == 2
    with pytest.raises(LaunchError, match="give one of them"):
        flags("-np", "2", "--host-discovery", "slurm", "-H", "a:2")
    with pytest.raises(LaunchError, match="--notice-script is for elastic jobs"):
        flags("-np", "2", "--notice-script", "true")
    with pytest.raises(LaunchError, match="--notice-signal KILL: it can be USR1 or USR2"):
        flags("-np", "2", "--min-np", "1", "--notice-signal", "KILL")
    told = flags("-np", "2", "--min-np", "1", "--notice-signal", "SIGUSR1", "--notice-script", "x y")
    assert told is not None and (told.notice_signal, told.notice_script) == ("USR1", "x y")
    path = tmp_path / "job.yaml"
    path.write_text("elastic:\n  host-discovery: dns:w\n  notice-script: x\n  notice-signal: USR1\n")
    assert load(str(path))[0] == {"host_discovery": "dns:w", "notice_script": "x", "notice_signal": "USR1"}
