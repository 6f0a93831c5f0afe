"""What an elastic job is asked for with, under both names: flags, a file's section, run()'s arguments; and what its
workers find in their environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from horoclone.launch import config_file
from horoclone.launch.discovery import File, Fixed, Script
from horoclone.launch.elastic_options import Elastic, elastic_of
from horoclone.launch.hosts import Host
from horoclone.launch.options import build_parser
from horoclone.launch.usage import LaunchError

RUN = [sys.executable, "-m", "horoclone.launch"]


def asked(words: str, program: str = "horovodrun") -> Elastic | None:
    return elastic_of(build_parser(program).parse_args([*words.split(), "python", "train.py"]), program)


@pytest.mark.parametrize("program", ["horoclonerun", "horovodrun"])
@pytest.mark.parametrize(
    "words",
    [
        "-np 4 --min-np 2 --max-np 8 --slots-per-host 3 --host-discovery-script ./find.sh",
        "--num-proc 4 --min-num-proc 2 --max-num-proc 8 --slots 3 --host-discovery-script ./find.sh",
    ],
)
def test_horovodruns_flags_and_their_twins(program: str, words: str) -> None:
    more = "--elastic-timeout 30 --reset-limit 7 --blacklist-cooldown-range 10 100 --network-interfaces lo"
    found = asked(f"{words} {more}", program)
    assert found is not None and isinstance(found.source, Script)
    assert (found.size, found.plan.smallest, found.plan.largest) == (4, 2, 8)
    assert (found.timeout_s, found.resets, found.cooldown.bounds) == (30.0, 7, (10, 100))
    assert found.plan.whole_host == (program == "horovodrun"), "Horovod's rule under Horovod's name"


def test_what_is_not_said_is_as_in_horovod(tmp_path: Path) -> None:
    found = asked("--min-np 2 -H a:2,b:2")  # hosts that are named, without a script
    assert found is not None and isinstance(found.source, Fixed) and found.size == 2
    assert found.source.find() == [Host("a", 2), Host("b", 2)]
    assert (found.plan.largest, found.timeout_s, found.resets, found.cooldown.bounds) == (
        None,
        600.0,
        None,
        None,
    )
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n")
    found = asked(f"-np 2 --max-np 4 --hostfile {file}")
    assert found is not None and isinstance(found.source, File) and found.plan.smallest == 2
    assert asked("-np 2 -H a:2") is None


@pytest.mark.parametrize(
    "flag", ["-np", "--min-np", "--max-np", "--slots-per-host", "--reset-limit", "--ssh-port"]
)
@pytest.mark.parametrize("value", ["2.5", "-1", "0", "nan", "1e3", "True", "\u00b2", "9" * 40, ""])
def test_a_flag_that_counts_takes_whole_numbers(flag: str, value: str) -> None:
    with pytest.raises(LaunchError, match=flag):
        build_parser("horoclonerun").parse_args([flag, value, "x"])


def test_the_section_of_a_file_has_the_names_of_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "elastic:\n  min_num_proc: 2\n  max-np: 8\n  slots: 3\n  elastic_timeout: 30\n  reset-limit: 7\n"
        "  blacklist-cooldown-range: [10, 100]\n  host-discovery-script: ./find.sh\n"
    )
    pytest.importorskip("yaml")
    flags, _ = config_file.load(str(path))
    assert flags == {
        "min_np": 2, "max_np": 8, "slots_per_host": 3, "elastic_timeout": 30, "reset_limit": 7,
        "blacklist_cooldown_range": [10, 100], "host_discovery_script": "./find.sh",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("min_np", "slots", "reset_limit") for value in ("2.5", "0", "-1", ".nan", "yes", "'2'", "1e3", "99999999")),
        *(("elastic_timeout", value) for value in (".nan", ".inf", "-1", "yes", "'5'")),
    ],
)  # fmt: skip
def test_numbers_of_the_section_are_numbers_or_refused_by_name(tmp_path: Path, key: str, value: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "job.yaml"
    file.write_text(f"elastic:\n  {key}: {value}\n")
    with pytest.raises(LaunchError, match=f"elastic.{key}: expected"):
        config_file.load(str(file))


@pytest.mark.parametrize("value", ["2.5", "'2.5'", "0", "-1", ".nan", "yes", "99999999"])
def test_the_number_of_ranks_in_a_file_is_one(tmp_path: Path, value: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "job.yaml"
    file.write_text(f"num_proc: {value}\n")
    with pytest.raises(LaunchError, match="num_proc: expected int or str"):
        config_file.load(str(file))


def test_what_is_true_or_false_in_the_section_may_be_said(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "job.yaml"
    file.write_text("elastic:\n  survive_launcher: true\n")
    assert config_file.load(str(file))[0] == {"survive_launcher": True}


def test_workers_find_horovods_variables(launch: Any) -> None:
    program = "import os; print({n: v for n, v in os.environ.items() if n.startswith('HOROVOD_')})"
    flags = ["-np", "1", "--min-np", "1", "--elastic-timeout", "50", "--network-interfaces", "lo"]
    said = launch([*RUN, *flags, sys.executable, "-c", program], timeout_s=60).stdout
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME ELASTIC GLOO_RENDEZVOUS_PORT"
    for name in names.split():
        assert f"'HOROVOD_{name}': '" in said, said
    for text in ("ELASTIC': '1", "ELASTIC_TIMEOUT': '50", "GLOO_IFACE': 'lo", "CONTROLLER': 'gloo"):
        assert f"HOROVOD_{text}'" in said, said
    assert "'HOROVOD_GLOO_RENDEZVOUS_ADDR': '127.0.0.1'" in said
