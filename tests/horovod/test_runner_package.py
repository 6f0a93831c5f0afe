"""horovod.runner: the module paths that scripts written for Horovod import, and that what lies there works."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pkgutil
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import horoclone.runner
from horoclone.errors import Unsupported
from horoclone.runner import _HorovodArgs, gloo_run, launch, mpi_run
from horoclone.runner.common.util import (
    address,
    codec,
    config_parser,
    env,
    host_hash,
    hosts,
    network,
    safe_shell_exec,
    secret,
    settings,
    timeout,
    tiny_shell_exec,
)
from horoclone.runner.elastic import discovery
from horoclone.runner.util import cache, lsf, remote, streams, threads
from horoclone.runner.util import network as addresses

ROOT = Path(__file__).resolve().parents[2]
PYTHON = shlex.quote(sys.executable)

# What was found imported in projects that start jobs themselves, and in Horovod's own examples and tests.
IN_USE = {
    "runner": "run _HorovodArgs launch gloo_run mpi_run",
    "runner.launch": "run_commandline _run parse_args check_build gloo_built mpi_built",
    "runner.gloo_run": "gloo_run gloo_run_elastic launch_gloo launch_gloo_elastic create_slot_env_vars "
    "create_run_env_vars create_run_envs get_run_command register_shutdown_event _get_min_start_hosts",
    "runner.mpi_run": "mpi_run mpi_available is_open_mpi is_mpich is_intel_mpi is_spectrum_mpi",
    "runner.js_run": "js_run is_jsrun_installed",
    "runner.common.util": "codec config_parser env host_hash hosts network safe_shell_exec secret settings timeout "
    "tiny_shell_exec address",
    "runner.common.util.hosts": "HostInfo SlotInfo INVALID_SLOT_INFO parse_hosts parse_host_files parse_hosts_and_slots "
    "get_host_assignments",
    "runner.common.util.secret": "make_secret_key compute_digest check_digest HOROVOD_SECRET_KEY DIGEST_LENGTH",
    "runner.common.util.env": "get_env_rank_and_size is_exportable is_kubeflow_mpi LOG_LEVEL_STR IGNORE_REGEXES",
    "runner.common.util.timeout": "Timeout TimeoutException",
    "runner.common.util.settings": "Settings BaseSettings",
    "runner.common.util.codec": "dumps_base64 loads_base64",
    "runner.common.util.host_hash": "host_hash _hash",
    "runner.common.util.config_parser": "set_env_from_args set_args_from_config validate_config_args LOG_LEVELS "
    "HOROVOD_FUSION_THRESHOLD HOROVOD_CYCLE_TIME HOROVOD_TIMELINE HOROVOD_LOG_LEVEL HOROVOD_GLOO_TIMEOUT_SECONDS",
    "runner.common.util.safe_shell_exec": "execute GRACEFUL_TERMINATION_TIME_S",
    "runner.common.util.tiny_shell_exec": "execute",
    "runner.common.util.network": "BasicService BasicClient Wire PingRequest PingResponse AckResponse NoValidAddressesFound",
    "runner.common.service.driver_service": "BasicDriverService BasicDriverClient RegisterTaskRequest "
    "AllTaskAddressesRequest AllTaskAddressesResponse RegisterTaskToTaskAddressesRequest",
    "runner.common.service.task_service": "BasicTaskService BasicTaskClient RunCommandRequest AbortCommandRequest "
    "CommandExitCodeRequest CommandExitCodeResponse WaitForCommandExitCodeRequest WaitForCommandExitCodeResponse "
    "NotifyInitialRegistrationCompleteRequest RegisterCodeResultRequest CommandOutputNotCaptured",
    "runner.task.task_service": "HorovodRunTaskService HorovodRunTaskClient",
    "runner.common.service.compute_service": "ComputeService ComputeClient",
    "runner.util.threads": "in_thread on_event execute_function_multithreaded",
    "runner.util.network": "find_port get_driver_ip get_local_host_addresses filter_local_addresses resolve_host_address "
    "get_local_intfs",
    "runner.util.remote": "get_remote_command get_ssh_command SSH_COMMAND_PREFIX",
    "runner.util.streams": "Pipe",
    "runner.util.cache": "Cache use_cache",
    "runner.util.lsf": "LSFUtils",
    "runner.http.http_server": "RendezvousServer KVStoreServer RendezvousHandler KVStoreHandler "
    "RendezvousHTTPServer KVStoreHTTPServer OK BAD_REQUEST TIMEOUT SINGLE_REQUEST_TIMEOUT",
    "runner.http.http_client": "read_data_from_kvstore put_data_into_kvstore",
    "runner.driver.driver_service": "HorovodRunDriverService HorovodRunDriverClient get_common_interfaces "
    "get_local_interfaces",
    "runner.elastic.discovery": "HostDiscovery HostDiscoveryScript FixedHosts HostManager HostState DiscoveredHosts",
    "runner.elastic.driver": "ElasticDriver Results ResultsRecorder DISCOVER_HOSTS_FREQUENCY_SECS ELASTIC_TIMEOUT_SECS",
    "runner.elastic.registration": "WorkerStateRegistry READY SUCCESS FAILURE",
    "runner.elastic.constants": "RESET_LIMIT_EXCEEDED_MESSAGE",
    "runner.elastic.settings": "ElasticSettings",
    "runner.elastic.rendezvous": "create_rendezvous_handler GET_RANK_AND_SIZE PUT_WORKER_ADDRESSES",
    "runner.elastic.worker": "WorkerNotificationManager WorkerNotificationService WorkerNotificationClient "
    "HostUpdateResult HostsUpdatedRequest",
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
import horovod.runner.common.util.safe_shell_exec as patched
patched.GRACEFUL_TERMINATION_TIME_S = 77
from horoclone.runner.common.util import safe_shell_exec
assert safe_shell_exec.GRACEFUL_TERMINATION_TIME_S == 77
from horoclone.launch import api
assert api._grace_s(None) == 77.0
import horovod
assert horovod.run is horovod.runner.run
try:
    from horovod.run.runner import run  # the older path: pytorch-ignite tries it first
except ImportError:
    print(sorted({{"numpy", "torch", "tensorflow", "horoclone._core"}} & set(sys.modules)))
look({NEEDS_NUMPY!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_every_module_of_the_package_can_be_imported() -> None:
    import importlib

    found = [name for _, name, _ in pkgutil.walk_packages(horoclone.runner.__path__, "horoclone.runner.")]
    assert len(found) > 40
    for name in found:
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("run_task", "main"),
        ("task_fn", "main"),
        ("js_run", "js_run"),
    ],
)
def test_what_is_not_here_says_so_on_use(path: str, name: str) -> None:
    import importlib

    kind = getattr(importlib.import_module(f"horoclone.runner.{path}"), name)
    assert kind is getattr(importlib.import_module(f"horoclone.runner.{path}"), name)
    with pytest.raises(Unsupported, match=rf"horovod\.runner\.{path}\.{name}: .{{30}}"):
        kind()


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
    variables = gloo_run.create_slot_env_vars(placed[2])
    assert variables["HOROVOD_RANK"] == "2" and variables["HOROVOD_CROSS_RANK"] == "1" and len(variables) == 7


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


def test_a_shell_command_gives_its_output_and_exit_code() -> None:
    out, err = io.StringIO(), io.StringIO()
    code = safe_shell_exec.execute(
        "echo hello; echo world >&2; exit 7",
        env={"PATH": os.environ["PATH"]},
        stdout=out,
        stderr=err,
        index=3,
    )
    assert (code, out.getvalue(), err.getvalue()) == (7, "[3]<stdout>:hello\n", "[3]<stderr>:world\n")
    out = io.StringIO()
    assert safe_shell_exec.execute("kill -KILL $$", stdout=out) == 137
    assert (
        safe_shell_exec.execute("printf 'a\\rb\\n\\342\\202\\254'", stdout=out) == 0
        and out.getvalue() == "a\rb\n€"
    )
    assert tiny_shell_exec.execute("echo a; echo b >&2; exit 2") in (("a\nb\n", 2), ("b\na\n", 2))
    assert tiny_shell_exec.execute("echo $ONLY", env={"ONLY": "this"}) == ("this\n", 0)


# A tree: a shell, a Python that ignores SIGTERM, and its child, which does so too. Each says who it is.
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__])
time.sleep(600)
"""


def pids_of(read, count: int, limit_s: float = 60.0) -> list[int]:
    deadline = time.monotonic() + limit_s
    while len(pids := [int(word) for word in read().split()]) < count:
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
    return pids


def is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_there(pid)]
        time.sleep(0.02)


def test_an_event_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    monkeypatch.setattr(safe_shell_exec, "GRACEFUL_TERMINATION_TIME_S", 0.3)
    event, out, codes = threading.Event(), io.StringIO(), []
    command = f"{PYTHON} {script} child; true"  # `; true`: the shell stays a process of its own
    running = threads.in_thread(
        lambda: codes.append(safe_shell_exec.execute(command, stdout=out, events=[threading.Event(), event]))
    )
    pids = pids_of(out.getvalue, 2)
    assert all(map(is_there, pids))
    event.set()
    running.join(30)
    assert codes == [128 + signal.SIGTERM]
    wait_until_gone(pids)


def test_no_process_is_left_when_the_one_that_called_is_killed(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text(TREE)
    program = (
        "from horoclone.runner.common.util import safe_shell_exec\n"
        f"safe_shell_exec.execute('{PYTHON} {tmp_path / 'tree.py'} child; true')\n"
    )
    out = tmp_path / "out"
    with out.open("w") as file:
        caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=file)
    try:
        pids = pids_of(out.read_text, 2)
    finally:
        caller.kill()
        caller.wait()
    wait_until_gone(pids)


def test_services_answer_those_who_hold_the_key() -> None:
    class Counter(network.BasicService):
        def _handle(self, req, client_address):
            if isinstance(req, int):
                return req + 1
            if req == "text":
                return network.AckStreamResponse(), io.StringIO("first\nsecönd\n")
            return super()._handle(req, client_address)

    key = secret.make_secret_key()
    service = Counter("counter", key, ["lo"])
    try:
        where = service.addresses()
        assert where == {"lo": [("127.0.0.1", service.get_port())]}
        client = network.BasicClient("counter", where, key, verbose=0, match_intf=True)
        assert client.addresses() == where and client._send(41) == 42
        text = io.StringIO()
        assert isinstance(client._send("text", text), network.AckStreamResponse)
        assert text.getvalue() == "first\nsecönd\n"
        for name, other in (("counter", secret.make_secret_key()), ("another", key)):
            with pytest.raises(
                network.NoValidAddressesFound, match=f"{name} answers at none of these addresses"
            ):
                network.BasicClient(name, where, other, verbose=0, probe_timeout=5.0, attempts=1)
    finally:
        service.shutdown()
    with pytest.raises(network.NoValidAddressesFound):
        network.BasicService("nowhere", key, ["no-such-interface"])
    assert address.local_addresses(["lo"]) == {"lo": ["127.0.0.1"]}


def test_a_message_of_a_stranger_is_not_unpickled() -> None:
    key = secret.make_secret_key()
    forged = io.BytesIO()
    network.Wire(secret.make_secret_key()).write(os.getcwd, forged)
    with pytest.raises(PermissionError, match="digest did not match"):
        network.Wire(key).read(io.BytesIO(forged.getvalue()))
    with pytest.raises(PermissionError, match="digest did not match"):
        network.Wire(key).read(io.BytesIO(b"\xff" * 36))
    right = io.BytesIO()
    network.Wire(key).write("well", right)
    assert network.Wire(key).read(io.BytesIO(right.getvalue())) == "well"
    with pytest.raises(EOFError):
        network.Wire(key).read(io.BytesIO(right.getvalue()[:-1]))


class _Counting(network.BasicService):
    def _handle(self, req: Any, client_address: Any) -> Any:
        if isinstance(req, str):
            requests.append(req)
            return network.AckResponse()
        return super()._handle(req, client_address)


requests: list[str] = []


def test_a_service_takes_nothing_large_old_or_silent_from_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PROOF_S", 1.0)
    key = secret.make_secret_key()
    service = _Counting("counting", key, ["lo"])
    place = ("127.0.0.1", service.get_port())
    assert service._server.server_address == place, "one address is all that it needs"
    try:
        client = network.BasicClient("counting", service.addresses(), key)
        with socket.create_connection(place) as stranger:  # announces 1 GiB, without the key
            stranger.settimeout(10)
            stranger.sendall(b"\0\0\0\x40" + bytes(32))
            with pytest.raises(OSError):
                for _ in range(60):
                    stranger.sendall(bytes(1 << 20))
        recorded = io.BytesIO()
        with socket.create_connection(place) as first:
            network.Wire(key).write("start", recorded, first.recv(network.NONCE_BYTES) + b"request")
            first.sendall(recorded.getvalue())
            assert first.recv(1)
        with socket.create_connection(place) as second:  # the same bytes again
            second.settimeout(10)
            second.recv(network.NONCE_BYTES)
            second.sendall(recorded.getvalue())
            with contextlib.suppress(ConnectionError):
                assert second.recv(1) == b""
        assert requests == ["start"]
        silent = [socket.create_connection(place) for _ in range(3 * network.MOST_UNPROVEN)]
        assert isinstance(client._send("still there"), network.AckResponse)
        for one in silent:
            one.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while one.recv(64):
                    pass
            one.close()
    finally:
        service.shutdown()


# --- runner.common.service


def test_tasks_say_where_they_answer_and_on_which_host_they_are() -> None:
    from horoclone.runner.driver.driver_service import HorovodRunDriverClient, HorovodRunDriverService

    key = secret.make_secret_key()
    service = HorovodRunDriverService(2, key, ["lo"])
    try:
        client = HorovodRunDriverClient(service.addresses(), key)
        where = {"lo": [("127.0.0.1", 7)], "other": [("10.9.9.9", 7)]}
        client.register_task(1, where, "before")
        with pytest.raises(timeout.TimeoutException, match="for tasks to start"):
            service.wait_for_initial_registration(timeout.Timeout(0.05, "waiting for {activity}"))
        client.register_task(1, where, "a")
        client.register_task(0, where, "a")
        service.wait_for_initial_registration(timeout.Timeout(30, "{activity}"))
        assert service.task_addresses_for_driver(0) == {"lo": [("127.0.0.1", 7)]}
        assert client.all_task_addresses(1) == where and service.task_indices() == [1, 0]
        assert service.task_host_hash_indices() == {"a": [0, 1]} and service.task_index_host_hash(0) == "a"
        for index in (0, 1):
            client.register_task_to_task_addresses(index, {"lo": []})
        service.wait_for_task_to_task_address_updates(timeout.Timeout(30, "{activity}"))
        assert service.task_addresses_for_tasks(1) == {"lo": []}
        with pytest.raises(ValueError, match="no task 2"):
            service.register_task_to_task_addresses(2, {})
    finally:
        service.shutdown()


def test_a_task_runs_one_command_for_who_holds_the_key() -> None:
    from horoclone.runner.common.service.task_service import CommandOutputNotCaptured
    from horoclone.runner.task.task_service import HorovodRunTaskClient, HorovodRunTaskService

    key, out = secret.make_secret_key(), io.StringIO()
    service = HorovodRunTaskService(3, key, ["lo"])
    try:
        client = HorovodRunTaskClient(3, service.addresses(), key)
        assert not service.check_for_command_start(0.01) and client.command_result() == (False, None)
        with pytest.raises(timeout.TimeoutException, match="command to run"):
            service.wait_for_command_start(timeout.Timeout(0.02, "{activity}"))
        client.run_command("echo $GREETING; exit 4", {"GREETING": "hello"}, capture_stdout=True)
        client.run_command("echo never", {})  # once
        assert service.check_for_command_start(30)
        reader, nobody = client.stream_command_output(stdout=out)
        assert client.wait_for_command_exit_code(0.1) == 4 and client.command_result() == (True, 4)
        assert nobody is None and reader is not None
        reader.join(30)
        assert out.getvalue() == "[3]<stdout>:hello\n"
        assert isinstance(service.stream_output(None), CommandOutputNotCaptured)
        client.notify_initial_registration_complete()
        service.wait_for_initial_registration(timeout.Timeout(30, "{activity}"))
        client.register_code_result({"loss": 1})
        assert service.fn_result() == {"loss": 1}
        other = HorovodRunTaskService(4, key, ["lo"])
        sleeper = HorovodRunTaskClient(4, other.addresses(), key)
        sleeper.run_command("sleep 60", {"PATH": os.environ["PATH"]})
        sleeper.abort_command()
        assert sleeper.wait_for_command_exit_code(0.1) == 128 + signal.SIGTERM
        other.shutdown()
    finally:
        service.shutdown()


def test_dispatchers_and_workers_of_a_data_service_find_each_other() -> None:
    from horoclone.runner.common.service.compute_service import ComputeClient, ComputeService

    key = secret.make_secret_key()
    service = ComputeService(2, 1, key, ["lo"])
    client = ComputeClient(service.addresses(), key)
    client.register_dispatcher(1, "grpc://a")
    assert client.wait_for_dispatcher_registration(1, 30) == "grpc://a"
    with pytest.raises(
        ValueError, match="already been registered under different address grpc://a: grpc://b"
    ):
        client.register_dispatcher(1, "grpc://b")
    with pytest.raises(IndexError, match=r"within \[0\.\.1\]: 2"):
        client.register_worker_for_dispatcher(2, 0)
    with pytest.raises(timeout.TimeoutException, match="workers for dispatcher 0 to register"):
        client.wait_for_dispatcher_worker_registration(0, 0.05)
    client.register_worker_for_dispatcher(0, 0)
    client.wait_for_dispatcher_worker_registration(0, 30)
    over = threading.Event()
    threads.in_thread(lambda: (client.wait_for_shutdown(), over.set()))
    client.shutdown()
    assert over.wait(30)
    service.shutdown()
    client.wait_for_shutdown()  # the service is gone: whoever asks late does not fail
    with pytest.raises(ValueError, match="must be larger than 0"):
        ComputeService(0, 1, key)


def test_interfaces_for_the_ranks_of_some_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    from horoclone.runner.driver import driver_service

    wishes = settings.Settings(hosts="localhost:2")
    monkeypatch.delenv("LSB_JOBID", raising=False)
    assert driver_service.get_common_interfaces(wishes, ["localhost"]) == {"lo"}
    wishes.nics = {"mine0"}
    assert driver_service.get_common_interfaces(wishes, ["x"], ["x"]) == {"mine0"}
    with pytest.raises(ValueError, match=r"No interface is found for address 127\.0\.0\.1"):
        driver_service.get_local_interfaces(wishes)
    wishes.nics = None
    monkeypatch.setattr(driver_service, "local_addresses", lambda: {"lo": ["127.0.0.1"], "e0": ["10.0.0.7"]})
    assert driver_service.get_common_interfaces(wishes, ["x"], ["x"]) == {"e0"}


# --- runner.util


def test_functions_run_in_threads() -> None:
    assert threads.execute_function_multithreaded(lambda a, b: a * b, [[2, 3], (4, 5)]) == {0: 6, 1: 20}
    assert threads.execute_function_multithreaded(print, []) == {}
    both = threading.Barrier(2, timeout=30)
    assert threads.execute_function_multithreaded(lambda: both.wait() >= 0, [[], []]) == {0: True, 1: True}
    with pytest.raises(ZeroDivisionError):
        threads.execute_function_multithreaded(lambda a: 1 // a, [[1], [0]])
    done = threading.Event()
    assert threads.execute_function_multithreaded(done.set, [[]], block_until_all_done=False) is None
    assert done.wait(30)
    seen: list[int] = []
    thread = threads.in_thread(seen.append, (7,), name="mine")
    thread.join(30)
    assert seen == [7] and thread.name == "mine" and thread.daemon
    threads.in_thread(lambda: 1 // 0, silent=True).join(30)  # pytest would report the exception of a thread
    with pytest.raises(ValueError, match="args must be a tuple"):
        threads.in_thread(seen.append, 7)  # type: ignore[arg-type]


def test_an_event_calls_a_function_unless_it_was_stopped_before() -> None:
    event, seen = threading.Event(), []
    thread = threads.on_event(event, seen.append, (1,))
    event.set()
    thread.join(30)
    assert seen == [1]
    stop = threading.Event()
    thread = threads.on_event(
        threading.Event(), seen.append, (2,), stop=stop, check_stop_interval_s=0.01, daemon=False
    )
    stop.set()
    thread.join(30)
    assert seen == [1] and not thread.is_alive()
    with pytest.raises(ValueError, match="no daemon"):
        threads.on_event(event, print, daemon=False)


def test_a_pipe_hands_text_from_thread_to_thread() -> None:
    pipe = streams.Pipe()
    writer = threads.in_thread(lambda: [pipe.write(text) for text in ("abcdefg", "h")] and pipe.close())
    assert [pipe.read(3), pipe.read(), pipe.read(), pipe.read()] == ["abc", "defg", "h", None]
    writer.join(30)
    with pytest.raises(RuntimeError, match="closed"):
        pipe.write("x")


def test_addresses_and_ports_of_this_host() -> None:
    import socketserver

    assert "127.0.0.1" in addresses.get_local_host_addresses() and "lo" in addresses.get_local_intfs()
    assert addresses.get_local_intfs("none") == set() and addresses.get_driver_ip(["lo"]) == "127.0.0.1"
    with pytest.raises(RuntimeError, match="no IPv4 address"):
        addresses.get_driver_ip(["no-such-interface"])
    assert addresses.resolve_host_address("localhost") == "127.0.0.1"
    assert addresses.resolve_host_address("no-such-host.invalid") is None
    assert addresses.filter_local_addresses(["localhost", "no-such-host.invalid"]) == ["no-such-host.invalid"]
    server, port = addresses.find_port(
        lambda where: socketserver.TCPServer(where, socketserver.BaseRequestHandler)
    )
    with server:
        assert server.server_address[1] == port

    def never(where):
        raise OSError("taken")

    with pytest.raises(RuntimeError, match="taken"):
        addresses.find_port(never)


def test_the_command_for_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote.get_remote_command("uptime", "node-b", 2222, "key", 10) == (
        "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no node-b -p 2222 -i key -o ConnectTimeout=10 uptime"
    )
    monkeypatch.setattr(remote, "SSH_COMMAND_PREFIX", "ssh -F mine")
    assert remote.get_ssh_command("uptime", "node-b") == "ssh -F mine node-b uptime"
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    assert remote.get_remote_command("uptime", "pod", 22) == "/etc/mpi/kubexec.sh pod uptime"


def test_a_job_of_lsf_is_read_from_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LSB_JOBID", raising=False)
    monkeypatch.delenv("LSB_MCPU_HOSTS", raising=False)
    assert not lsf.LSFUtils.using_lsf()
    with pytest.raises(RuntimeError, match="no job of LSF"):
        lsf.LSFUtils.get_compute_hosts()
    monkeypatch.setenv("LSB_JOBID", "12")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "batch 1 node-a 4 node-b 4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lsf.LSFUtils.using_lsf() and lsf.LSFUtils.get_compute_hosts() == ["node-a", "node-b"]
    assert lsf.LSFUtils.get_num_cores() == 4 and lsf.LSFUtils.get_num_processes() == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert lsf.LSFUtils.get_num_gpus() == 2 and lsf.LSFUtils.get_num_processes() == 4
    assert lsf.LSFUtils.get_num_threads() >= 1


def test_results_are_kept_for_their_time(tmp_path: Path) -> None:
    calls: list[object] = []

    @cache.use_cache()
    def check(what: str, deep: bool = False) -> bool | None:
        calls.append(what)
        return None if what == "none" else deep

    kept = cache.Cache(str(tmp_path / "kept"), 60, "parameters")
    for _ in range(2):
        assert check("a", deep=True, fn_cache=kept) is True and check("none", fn_cache=kept) is None
    assert check("a", deep=True) is True and calls == ["a", "none", "none", "a"]
    again = cache.Cache(str(tmp_path / "kept"), 60, "parameters")
    assert check("a", deep=True, fn_cache=again) is True and len(calls) == 4
    for other in (
        cache.Cache(str(tmp_path / "kept"), -1, "parameters"),
        cache.Cache(str(tmp_path / "kept"), 60, "others"),
    ):
        check("a", deep=True, fn_cache=other)
    assert len(calls) == 6


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
    fixed = discovery.FixedHosts({"a": 1})
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}


def test_hosts_keep_their_order_and_failed_ones_cool_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from horoclone.runner.elastic.worker import HostUpdateResult

    now = [100.0]
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(discovery.random, "random", lambda: 0.5)
    fixed = discovery.FixedHosts({"b": 2, "a": 1})
    hosts = discovery.HostManager(fixed, cooldown_range=(10, 30))
    assert hosts.update_available_hosts() == HostUpdateResult.added
    assert hosts.update_available_hosts() == HostUpdateResult.no_update
    assert hosts.current_hosts.host_assignment_order == ["b", "a"]
    fixed.set({"c": 1, "a": 2, "b": 1})
    assert hosts.update_available_hosts() == HostUpdateResult.mixed
    assert hosts.current_hosts.host_assignment_order == ["b", "a", "c"]
    assert hosts.current_hosts.count_available_slots() == 4
    event = hosts.get_host_event("a")
    hosts.blacklist("a")
    assert event.is_set() and hosts.is_blacklisted("a")
    assert hosts.current_hosts.host_assignment_order == ["b", "c"]
    now[0] += 24
    hosts.blacklist("a")  # does not make it longer
    now[0] += 1
    assert not hosts.is_blacklisted("a") and not hosts.get_host_event("a").is_set()
    assert hosts.update_available_hosts() == HostUpdateResult.added
    assert hosts.current_hosts.host_assignment_order == ["b", "c", "a"]
    fixed.set({"c": 1})
    gone = hosts.get_host_event("b")
    assert hosts.update_available_hosts() == HostUpdateResult.removed and gone.is_set()
    for wrong in ((0, 5), (5, 3601), (9, 8)):
        with pytest.raises(ValueError, match="cooldown range"):
            discovery.HostManager(fixed, wrong)
    forever = discovery.HostState()
    forever.blacklist()
    now[0] += 1e6
    assert forever.is_blacklisted()


def test_a_notice_goes_from_a_client_to_a_manager() -> None:
    from horoclone.runner.elastic import constants, worker
    from horoclone.runner.elastic.settings import ElasticSettings

    key, heard = secret.make_secret_key(), []

    class Manager:
        def handle_hosts_updated(self, timestamp: int, update: int) -> None:
            heard.append((timestamp, update))

    service = worker.WorkerNotificationService(key, ["lo"], Manager())
    try:
        client = worker.WorkerNotificationClient(service.addresses(), key)
        client.notify_hosts_updated(7, worker.HostUpdateResult.mixed)
    finally:
        service.shutdown()
    assert heard == [(7, 3)]
    made = ElasticSettings(discovery.FixedHosts({}), 1, max_num_proc=4, num_proc=2)
    assert codec.loads_base64(codec.dumps_base64(made)).discovery is None
    with pytest.warns(DeprecationWarning, match="use min_num_proc instead"):
        assert ElasticSettings(None, min_np=3).min_num_proc == 3
    assert (made.elastic, made.min_num_proc, made.max_num_proc, made.num_proc) == (True, 1, 4, 2)
    assert constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(3).endswith("exceeded limit: 3")


# --- starting jobs

SAYS_WHO = "import os; print(os.environ['HOROVOD_RANK'], os.environ.get('HOROVOD_CYCLE_TIME'), flush=True)"


def output_of(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(["-c", program] if program else []), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_job_is_started_by_horovods_functions() -> None:
    """As projects do that fill in _HorovodArgs, or Settings, themselves."""
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
from horoclone.runner.common.util.settings import Settings
from horoclone.runner.common.util.timeout import Timeout
from horoclone.runner.gloo_run import gloo_run
settings = Settings(hosts="localhost:2", num_proc=2, start_timeout=Timeout(60, "{{activity}}"))
gloo_run(settings, None, dict(os.environ), "127.0.0.1", [sys.executable, "-c", {SAYS_WHO!r}])
"""
    done = output_of(program)
    lines = done.stdout.splitlines()
    assert lines[0] == "[('0', '1.5'), ('1', '1.5')]", done.stdout + done.stderr
    assert sorted(lines[1:3]) == ["[0]<stdout>:0 1.5", "[1]<stdout>:1 1.5"] and lines[3] == "None"
    assert "exited with non-zero status: 3" in lines[4]
    assert sorted(lines[5:]) == ["[0]<stdout>:0 None", "[1]<stdout>:1 None"]


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


@pytest.mark.mpi
def test_mpi_is_recognised_and_starts_a_job(tmp_path: Path) -> None:
    if not mpi_run.mpi_available():
        pytest.skip("no mpirun is installed")
    families = [mpi_run.is_open_mpi(), mpi_run.is_mpich(), mpi_run.is_intel_mpi(), mpi_run.is_spectrum_mpi()]
    assert families.count(True) == 1
    wishes = settings.Settings(hosts="localhost:2", num_proc=2)
    program = "import os; from horoclone.runner.common.util import env; print(json.dumps(env.get_env_rank_and_size()))"
    command = [sys.executable, "-c", f"import json; {program}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "out").open("w+") as out:
        mpi_run.mpi_run(wishes, None, environment, command, stdout=out)
        out.seek(0)
        lines = [
            line[line.index("[", line.index(">")) if ">" in line else 0 :] for line in out if line.strip()
        ]
    assert sorted(json.loads(line) for line in lines) == [[0, 2], [1, 2]]
    with pytest.raises(RuntimeError, match="mpirun failed with exit code"):
        mpi_run.mpi_run(
            wishes, None, environment, ["false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
