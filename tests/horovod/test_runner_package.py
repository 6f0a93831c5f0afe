"""horovod.runner: the module paths that scripts written for Horovod import, and that what lies there works."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from world import ran, run_python

import horoclone.runner
from horoclone.runner import _HorovodArgs, launch
from horoclone.runner.common.util import codec, config_parser, env, host_hash, hosts, secret, timeout
from horoclone.runner.elastic import discovery

ROOT = Path(__file__).resolve().parents[2]

# What scripts of other projects import.
IN_USE = {
    "runner": "run _HorovodArgs launch",
    "runner.launch": "run_commandline _run parse_args check_build gloo_built mpi_built",
    "runner.common.util": "codec config_parser env host_hash hosts secret settings timeout",
    "runner.common.util.hosts": "HostInfo SlotInfo INVALID_SLOT_INFO parse_hosts parse_host_files parse_hosts_and_slots "
    "get_host_assignments",
    "runner.common.util.secret": "make_secret_key compute_digest check_digest HOROVOD_SECRET_KEY DIGEST_LENGTH",
    "runner.common.util.env": "get_env_rank_and_size is_exportable LOG_LEVEL_STR IGNORE_REGEXES",
    "runner.common.util.timeout": "Timeout TimeoutException",
    "runner.common.util.settings": "Settings BaseSettings",
    "runner.common.util.codec": "dumps_base64 loads_base64",
    "runner.common.util.host_hash": "host_hash _hash",
    "runner.common.util.config_parser": "set_env_from_args set_args_from_config validate_config_args LOG_LEVELS "
    "HOROVOD_FUSION_THRESHOLD HOROVOD_CYCLE_TIME HOROVOD_TIMELINE HOROVOD_LOG_LEVEL HOROVOD_GLOO_TIMEOUT_SECONDS",
    "runner.elastic.discovery": "HostDiscovery HostDiscoveryScript FixedHosts",
    "runner.elastic.settings": "ElasticSettings",
    "common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
}
NEEDS_NUMPY = {"common.elastic": "State ObjectState run_fn notification_manager"}


def test_every_path_in_use_is_the_same_module_under_both_names() -> None:
    program = f"""
import importlib, sys
from horoclone import horovod_alias
horovod_alias.install()
def look(paths):
    for path, names in paths.items():
        theirs = importlib.import_module("horovod." + path)
        assert theirs is importlib.import_module("horoclone." + path), path
        for name in names.split():
            exec(f"from horovod.{{path}} import {{name}}")
look({IN_USE!r})
import horovod
assert horovod.run is horovod.runner.run
try:
    from horovod.run.runner import run  # the older path: pytorch-ignite tries it first
except ImportError:
    print(sorted({{"numpy", "torch", "tensorflow", "horoclone._core"}} & set(sys.modules)))
look({NEEDS_NUMPY!r})
"""
    done = run_python(program, cwd=ROOT)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_every_module_of_the_package_can_be_imported() -> None:
    import importlib

    for _, name, _ in pkgutil.walk_packages(horoclone.runner.__path__, "horoclone.runner."):
        importlib.import_module(name)


def test_what_only_horovod_itself_imports_says_what_to_use() -> None:
    program = """
from horoclone import horovod_alias
horovod_alias.install()
for line, name in (
    ("from horovod.runner import gloo_run", "runner.gloo_run"),
    ("import horovod.runner.mpi_run", "runner.mpi_run"),
    ("from horovod.runner.http.http_server import RendezvousServer", "runner.http"),
    ("from horovod.runner.common.util import secret, safe_shell_exec", "runner.common.util.safe_shell_exec"),
    ("from horovod.runner.elastic.driver import ElasticDriver", "runner.elastic.driver"),
    ("from horovod.runner.util.threads import in_thread", "runner.util"),
):
    try:
        exec(line)
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        start = f"horovod.{name} is not in horoclone. "
        assert str(error).startswith(start) and len(str(error)) > len(start) + 30, error
    else:
        raise AssertionError(line)
print("well")
"""
    assert output_of(program).stdout == "well\n"


# --- runner.common.util


def test_hosts_are_parsed_and_given_ranks(tmp_path: Path) -> None:
    listed = hosts.parse_hosts("node-a:2,10.0.0.2:3")
    assert [(host.hostname, host.slots) for host in listed] == [("node-a", 2), ("10.0.0.2", 3)]
    assert hosts.parse_hosts_and_slots("a:1,b:4") == (["a", "b"], {"a": 1, "b": 4})
    assert hosts.HostInfo.from_string("c:3") == hosts.HostInfo("c", 3)
    for wrong in ("a:b", "a:1,,b:2", "a:0", "-x:1"):
        with pytest.raises(ValueError, match="Invalid host input"):
            hosts.parse_hosts(wrong)
    placed = hosts.get_host_assignments(listed, 2, 4)
    assert [(one.hostname, one.rank, one.local_rank, one.cross_rank, one.size) for one in placed] == [
        ("node-a", 0, 0, 0, 4), ("node-a", 1, 1, 0, 4), ("10.0.0.2", 2, 0, 1, 4), ("10.0.0.2", 3, 1, 1, 4),
    ]  # fmt: skip
    assert placed[3].to_response_string() == "3,4,1,2,1,2"
    assert [one.cross_size for one in hosts.get_host_assignments(listed, 5)] == [2, 2, 2, 2, 1]
    with pytest.raises(ValueError, match=r"more processes \(6\) than there are available slots \(5\)"):
        hosts.get_host_assignments(listed, 6)
    file = tmp_path / "hostfile"
    file.write_text("node-a slots=2\n# nothing\nnode-b slots=4\n")
    assert hosts.parse_host_files(str(file)) == "node-a:2,node-b:4"
    with pytest.raises(ValueError, match="no host in it"):
        file.write_text("")
        hosts.parse_host_files(str(file))


def test_a_digest_needs_the_key() -> None:
    key = secret.make_secret_key()
    assert len(key) == 32 and key != secret.make_secret_key()
    digest = secret.compute_digest(key, b"message")
    assert len(digest) == secret.DIGEST_LENGTH and secret.check_digest(key, b"message", digest)
    assert not secret.check_digest(key, b"Message", digest)
    assert not secret.check_digest(secret.make_secret_key(), b"message", digest)


def test_the_variables_name_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "HOROCLONE_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    assert env.get_env_rank_and_size() == (0, 1)
    for prefix, rank in (("PMI", 1), ("OMPI_COMM_WORLD", 2), ("HOROVOD", 3)):  # the later one wins
        monkeypatch.setenv(f"{prefix}_RANK", str(rank))
        with pytest.raises(RuntimeError, match=f"only one of {prefix}_RANK and {prefix}_SIZE"):
            env.get_env_rank_and_size()
        monkeypatch.setenv(f"{prefix}_SIZE", "4")
        assert env.get_env_rank_and_size() == (rank, 4)
    assert not env.is_exportable(secret.HOROVOD_SECRET_KEY) and env.is_exportable("LD_LIBRARY_PATH")
    monkeypatch.setattr(env, "IGNORE_REGEXES", {*env.IGNORE_REGEXES, "MY_.*"})
    assert not env.is_exportable("MY_TOKEN")


def test_a_timeout_names_what_was_going_on() -> None:
    limit = timeout.Timeout(60, "Timed out waiting for {activity}. Is it slow?")
    limit.check_time_out_for("nothing")
    assert 50 < limit.remaining() <= 60 and not limit.timed_out()
    over = timeout.Timeout(-1, "Timed out waiting for {activity}")
    assert over.timed_out() and over.remaining() == 0
    with pytest.raises(
        timeout.TimeoutException, match=r"^Timed out waiting for tasks\. Timeout after -1 seconds\.$"
    ) as one:
        over.check_time_out_for("tasks")
    assert one.value.message == str(one.value)


def test_objects_become_text_and_objects_again() -> None:
    text = codec.dumps_base64({"f": lambda x: x + 1, "n": [1, 2]})
    assert isinstance(text, str) and text.isascii()
    assert codec.loads_base64(text)["f"](1) == 2
    assert isinstance(codec.dumps_base64(1, to_ascii=False), bytes)


def test_the_hash_of_this_host_is_stable_and_depends_on_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    first = host_hash.host_hash()
    assert first == host_hash.host_hash() and first != host_hash.host_hash(salt="x")
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node-7.cluster")
    assert host_hash.host_hash().startswith("node-7-") and host_hash.host_hash() != first


def test_settings_go_from_the_file_into_arguments_and_variables() -> None:
    args = _HorovodArgs()
    args.cache_capacity, args.tcp_flag = 5, True  # type: ignore[assignment]
    config = {
        "controller": "gloo",
        "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 2.5, "cache_capacity": 9},
        "autotune": {"enabled": False, "log_file": "ignored"},
        "timeline": {"filename": "trace.json", "mark_cycles": True},
        "stall_check": {"enabled": False, "warning_time_seconds": 20},
        "logging": {"level": "INFO"},
    }
    config_parser.set_args_from_config(args, config, {"cache_capacity"})
    assert args.use_gloo is True and args.no_stall_check is True
    config_parser.validate_config_args(args)
    variables = config_parser.set_env_from_args({"KEPT": "1"}, args)
    assert variables == {
        "KEPT": "1",
        config_parser.HOROVOD_FUSION_THRESHOLD: str(32 << 20),  # type: ignore[attr-defined]
        config_parser.HOROVOD_CYCLE_TIME: "2.5",  # type: ignore[attr-defined]
        config_parser.HOROVOD_CACHE_CAPACITY: "5",  # type: ignore[attr-defined]
        "HOROVOD_TIMELINE": "trace.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_LOG_LEVEL": "INFO",
        "NCCL_IB_DISABLE": "1",
    }
    # Also what a script builds itself, with half of the names.
    made = Namespace(
        autotune=True, autotune_warmup_samples=3, timeline_filename=None, hierarchical_allreduce=False
    )
    assert config_parser.set_env_from_args({}, made) == {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "3",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    }
    args.cycle_time_ms = -1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cycle_time_ms=-1 must be >= 0"):
        config_parser.validate_config_args(args)
    args.cycle_time_ms, args.autotune_gaussian_process_noise = None, 1.5  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        config_parser.validate_config_args(args)
    with pytest.raises(ValueError, match="No such controller supported: star"):
        config_parser.set_args_from_config(_HorovodArgs(), {"controller": "star"}, set())


def test_a_script_finds_hosts(tmp_path: Path) -> None:
    script = discovery.HostDiscoveryScript("printf 'node-b:3\\nnode-a\\n\\nfe80::1:2\\n'", 4)
    assert list(script.find_available_hosts_and_slots().items()) == [
        ("node-b", 3),
        ("node-a", 4),
        ("fe80::1", 2),
    ]
    with pytest.raises(RuntimeError, match=r"Failed to execute discovery script: exit 3\. Exit code: 3"):
        discovery.HostDiscoveryScript("exit 3", 1).find_available_hosts_and_slots()
    with pytest.raises(RuntimeError, match="does not say how many slots 'x' has"):
        discovery.HostDiscoveryScript("echo x", None).find_available_hosts_and_slots()
    with pytest.raises(RuntimeError, match=r"discovery script: .*sleep 600.*: it ran for more than 0\.3 s"):
        discovery.HostDiscoveryScript("sleep 600 & sleep 600", 1, 0.3).find_available_hosts_and_slots()
    with pytest.raises(RuntimeError, match=r"Exit code: 1\nno answer"):
        discovery.HostDiscoveryScript("echo no answer >&2; exit 1", 1).find_available_hosts_and_slots()
    fixed = discovery.FixedHosts({"a": 1})
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}


def test_settings_of_an_elastic_job_travel_without_their_discovery() -> None:
    from horoclone.runner.elastic.settings import ElasticSettings

    made = ElasticSettings(discovery.FixedHosts({}), 1, max_num_proc=4, num_proc=2)
    assert codec.loads_base64(codec.dumps_base64(made)).discovery is None
    with pytest.warns(DeprecationWarning, match="use min_num_proc instead"):
        assert ElasticSettings(None, min_np=3).min_num_proc == 3
    assert (made.elastic, made.min_num_proc, made.max_num_proc, made.num_proc) == (True, 1, 4, 2)


# --- starting jobs

SAYS_WHO = "import os; print(os.environ['HOROVOD_RANK'], os.environ.get('HOROVOD_CYCLE_TIME'), flush=True)"


def output_of(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, *(["-c", program] if program else []), *arguments, cwd=ROOT)  # fmt: skip


def test_a_job_is_started_by_horovods_functions() -> None:
    """As projects do that fill in _HorovodArgs themselves."""
    program = f"""
import os, sys
from horoclone.runner import _HorovodArgs, run
from horoclone.runner.launch import _run
args = _HorovodArgs()
args.num_proc, args.hosts, args.cycle_time_ms, args.use_gloo = 2, "localhost:2", 1.5, True
args.run_func = lambda: (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_CYCLE_TIME"])
print(_run(args), flush=True)
args.run_func, args.command = None, [sys.executable, "-c", {SAYS_WHO!r}]
print(_run(args), flush=True)
args.command = [sys.executable, "-c", "raise SystemExit(3)"]
try:
    _run(args)
except RuntimeError as error:
    print(error, flush=True)
"""
    done = output_of(program)
    lines = done.stdout.splitlines()
    assert lines[0] == "[('0', '1.5'), ('1', '1.5')]", done.stdout + done.stderr
    assert sorted(lines[1:3]) == ["[0]<stdout>:0 1.5", "[1]<stdout>:1 1.5"] and lines[3] == "None"
    assert "exited with non-zero status: 3" in lines[4]


def test_horovodruns_module_is_a_program() -> None:
    start = "import runpy, sys; from horoclone import horovod_alias; horovod_alias.install()\n"
    start += (
        "sys.argv[0] = '-m'; runpy.run_module('horovod.runner.launch', run_name='__main__', alter_sys=True)"
    )
    done = output_of(start, "-np", "2", "--cycle-time-ms", "2", sys.executable, "-c", SAYS_WHO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:0 2.0", "[1]<stdout>:1 2.0"]
    assert output_of(start, "-np", "1", "false").returncode == 1


def test_the_command_line_becomes_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "-np 3 -H a:3 --gloo --no-stall-check --fusion-threshold-mb 7 --network-interfaces eth0 python train.py"
    monkeypatch.setattr(sys, "argv", ["horovodrun", *words.split()])
    args = launch.parse_args()
    assert (args.num_proc, args.hosts, args.use_gloo, args.nics) == (3, "a:3", True, "eth0")
    assert (args.no_stall_check, args.fusion_threshold_mb, args.command) == (True, 7, ["python", "train.py"])
    again = launch._command_line(args)
    assert (
        "--no-stall-check" in again
        and "--fusion-threshold-mb=7" in again
        and again[-2:] == ["python", "train.py"]
    )
    assert not any("min" in word or "cooldown" in word for word in again)
    args.min_num_proc, args.max_num_proc, args.slots, args.reset_limit = 2, 4, 3, 5  # type: ignore[assignment]
    args.host_discovery_script, args.elastic_timeout = "./hosts.sh", 60  # type: ignore[assignment]
    args.cooldown_range = (10, 20)  # type: ignore[assignment]
    text = " ".join(launch._command_line(args))
    for words in ("--min-np 2", "--max-np 4", "--slots-per-host 3", "--reset-limit 5", "--elastic-timeout 60",
                  "--host-discovery-script ./hosts.sh", "--blacklist-cooldown-range 10 20"):  # fmt: skip
        assert f" {words} " in text, text
    given: dict[str, object] = {}
    monkeypatch.setattr("horoclone.launch.api.run", lambda func, **options: given.update(options))
    args.run_func = print  # type: ignore[assignment]
    launch._run(args)
    assert (given["min_num_proc"], given["slots"], given["cooldown_range"]) == (2, 3, (10, 20))
