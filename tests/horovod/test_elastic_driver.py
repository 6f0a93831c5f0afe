"""horovod.runner.elastic.driver and what it builds on: who is started where, who waits for whom, and how it ends.

Workers are functions in threads that say what real ones would; the last tests start processes that train.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horoclone.runner import gloo_run
from horoclone.runner.common.util import network, secret
from horoclone.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horoclone.runner.common.util.settings import Settings
from horoclone.runner.elastic import constants, driver, registration, rendezvous, worker
from horoclone.runner.elastic.discovery import FixedHosts, HostDiscovery, HostManager
from horoclone.runner.elastic.driver import ElasticDriver
from horoclone.runner.elastic.settings import ElasticSettings
from horoclone.runner.http import http_client, http_server

STEPS = Path(__file__).resolve().parents[1] / "elastic" / "steps.py"
LIMIT_S = 60.0


class Rendezvous:
    """Stands for a RendezvousServer: the plans that it was told."""

    def __init__(self) -> None:
        self.plans: list[list[SlotInfo]] = []
        self.stopped = threading.Event()

    def init(self, plan: list[SlotInfo]) -> None:
        self.plans.append(list(plan))

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patching the constant takes effect, as Horovod's own tests expect."""
    monkeypatch.setattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.01)


@pytest.fixture
def make() -> Iterator[Callable[..., ElasticDriver]]:
    made: list[ElasticDriver] = []

    def start(slots: dict[str, int] | HostDiscovery, **options: Any) -> ElasticDriver:
        found = FixedHosts(slots) if isinstance(slots, dict) else slots
        given = {"min_num_proc": 2, "max_num_proc": 4, "timeout": LIMIT_S, **options}
        made.append(ElasticDriver(given.pop("rendezvous", Rendezvous()), found, **given))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_one(events: list[threading.Event]) -> None:
    until(lambda: any(event.is_set() for event in events))


Results = dict[int, tuple[SlotInfo, SlotInfo]]


def ready(one: ElasticDriver, slot: SlotInfo, seen: Results) -> tuple[int, float]:
    """A worker that waits for its place, notes it, and is done."""
    one.record_ready(slot.hostname, slot.local_rank)
    seen[slot.rank] = slot, one.get_slot_info(slot.hostname, slot.local_rank)
    return 0, time.time()


def codes(one: ElasticDriver) -> dict[str, int]:
    return {name: code for name, (code, _) in one.get_results().worker_results.items()}


def test_every_slot_gets_a_worker_and_keeps_its_place(make: Any) -> None:
    one, seen = make({"a": 2, "b": 2}), {}
    assert one.wait_for_available_slots(2).host_assignment_order == ["a", "b"]
    one.start(2, lambda slot, events: ready(one, slot, seen))
    assert codes(one) == {"a[0]": 0, "a[1]": 0, "b[0]": 0, "b[1]": 0} and one.finished()
    assert all(first == later for first, later in seen.values()) and sorted(seen) == [0, 1, 2, 3]
    assert one.world_size() == 4 and one.local_size("b") == 2 and one.get_coordinator_info().hostname == "a"
    assert one.get_slot_info("c", 0) is INVALID_SLOT_INFO and not one.has_rank_assignment("a", 2)


def test_a_host_that_fails_is_left_out_and_the_others_get_new_places(make: Any) -> None:
    one, seen = make({"a": 2, "b": 2}), {}

    def run(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.hostname == "a" and slot.local_rank == 0:
            return 1, time.time()
        if slot.hostname == "a":  # healthy, and told by its event to end
            with pytest.raises(AssertionError):
                one.record_ready("a", 1)
                wait_for_one(events)
                raise AssertionError
            return 143, time.time()
        return ready(one, slot, seen)

    one.start(2, run)
    assert codes(one) == {"b[0]": 0, "b[1]": 0}
    for before, now in seen.values():
        assert (now.rank, now.size, now.local_rank) == (before.rank - 2, 2, before.local_rank)
        assert (now.local_size, now.cross_rank, now.cross_size) == (2, 0, 1)
    assert one.get_slot_info("a", 1) is INVALID_SLOT_INFO  # -1: such a worker ends with code 0


def test_a_host_that_comes_is_used_at_the_next_rendezvous(make: Any) -> None:
    found = FixedHosts({"a": 2})
    one, seen = make(found), {}

    def run(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.hostname == "a":
            one.record_ready(slot.hostname, slot.local_rank)
            found.set({"b": 2, "a": 2})
            one.wait_for_available_slots(4)
            one.record_ready(slot.hostname, slot.local_rank)
        return ready(one, slot, seen)

    one.start(2, run)
    assert len(codes(one)) == 4
    assert all((first.rank, 4) == (later.rank, later.size) for first, later in seen.values())
    assert [seen[rank][0].hostname for rank in range(4)] == ["a", "a", "b", "b"], (
        "old hosts keep the low ranks"
    )


def test_success_of_one_ends_the_others_and_failure_of_all_is_told(make: Any) -> None:
    one = make({"a": 2, "b": 1})

    def run(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        if slot.rank == 0:
            return 0, time.time()
        one.record_ready(slot.hostname, slot.local_rank)
        wait_for_one(events)
        return 1, time.time()

    one.start(2, run)
    assert sorted(codes(one).values()) == [0, 1, 1]
    other = make({"a": 1, "b": 1})
    other.start(2, lambda slot, events: (3, time.time()))
    assert codes(other) == {"a[0]": 3, "b[0]": 3} and other.finished()


def test_the_limit_of_resets_ends_the_job_with_the_text_of_the_module(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert constants.RESET_LIMIT_EXCEEDED_MESSAGE == (
        "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
    )
    monkeypatch.setattr(constants, "RESET_LIMIT_EXCEEDED_MESSAGE", "no more than {}")
    one = make({"a": 2}, reset_limit=1)

    def run(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        while not one.finished():
            one.record_ready(slot.hostname, slot.local_rank)
        return 1, time.time()

    one.start(2, run)
    assert one.get_results().error_message == "no more than 1"


def test_a_worker_that_is_lost_while_it_waits_counts_as_failed(make: Any) -> None:
    one = make({"a": 1, "b": 1})
    registry = registration.WorkerStateRegistry(one, HostManager(FixedHosts({})), reset_limit=3)
    registry.reset(3)
    texts: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="READY overridden by FAILURE") as error:
            registry.record_ready("a", 0)
        texts.append(str(error.value))

    threads = [threading.Thread(target=wait), threading.Thread(target=registry.record_failure, args=("a", 0))]
    threads[0].start()
    until(lambda: registry.count(registration.READY) == 1)
    threads[1].start()
    threads[0].join(LIMIT_S)
    assert texts and registry.get(registration.FAILURE) == {("a", 0)}
    assert registry.get_recorded_slots() == [("a", 0)] and (registry.size(), registry.last_rendezvous()) == (
        3,
        1,
    )
    one.stop()
    threads[1].join(LIMIT_S)
    assert not threads[1].is_alive()


def test_waiting_for_slots_ends_with_hosts_with_a_text_or_with_the_job(make: Any) -> None:
    from horoclone.runner.common.util.timeout import TimeoutException

    found = FixedHosts({"a": 1})
    one = make(found, timeout=0.2)
    with pytest.raises(TimeoutException, match=r"at least 8 Horovod processes\. An elastic .* two hosts"):
        one.wait_for_available_slots(8, min_hosts=2)
    threading.Timer(0.05, found.set, ({"a": 1, "b": 7},)).start()
    patient = make(found)
    assert patient.wait_for_available_slots(8, min_hosts=2).available_hosts == {"a", "b"}
    patient.stop()
    with pytest.raises(RuntimeError, match="has been shutdown"):
        patient.wait_for_available_slots(9)


def test_a_discovery_that_never_worked_ends_the_job_and_a_later_failure_does_not(make: Any) -> None:
    class Moody(HostDiscovery):
        def __init__(self, *answers: Any) -> None:
            self.answers = list(answers)

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, str):
                raise RuntimeError(answer)
            return dict(answer)

    one = make(Moody("no such script"))
    with pytest.raises(RuntimeError):
        one.wait_for_available_slots(1)
    assert one.finished() and one.get_results().error_message == "no such script"
    other = make(Moody({"a": 1}, "a hiccup", {"a": 2}))
    assert other.wait_for_available_slots(2).host_slots == {"a": 2} and not other.finished()


def test_without_a_host_of_the_set_before_nobody_has_the_state(make: Any) -> None:
    found = FixedHosts({"a": 2})
    one = make(found)

    def run(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        one.record_ready(slot.hostname, slot.local_rank)
        found.set({"b": 2})
        until(lambda: one._host_manager.current_hosts.available_hosts == {"b"})
        one.record_ready(slot.hostname, slot.local_rank)
        return 1, time.time()

    one.start(2, run)
    text = one.get_results().error_message
    assert text == "No hosts from previous set remaining, unable to broadcast state."


def test_the_older_names_of_the_arguments_are_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="use m.._num_proc instead"):
        one = ElasticDriver(Rendezvous(), FixedHosts({"a": 1}), min_np=1, max_np=1)
    one.stop()
    assert one.finished() and one._rendezvous.stopped.is_set()


# --- over HTTP


def test_rank_0_hears_over_http_that_hosts_come_and_go(make: Any) -> None:
    found, server = FixedHosts({"a": 2}), http_server.RendezvousServer()
    one = make(found, rendezvous=server)
    port = server.start(rendezvous.create_rendezvous_handler(one))
    heard: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    class Ear:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def on_hosts_updated(self, timestamp: int, update: int) -> None:
            heard[self.rank].append((timestamp, update))

    def ask(slot: SlotInfo) -> str:
        where = f"http://127.0.0.1:{port}/rank_and_size/{slot.hostname}:{slot.local_rank}"
        with urllib.request.urlopen(where, timeout=LIMIT_S) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    def run(slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        manager = worker.WorkerNotificationManager()
        manager.init("127.0.0.1", port, "lo", slot.hostname, slot.local_rank)
        manager.init("127.0.0.1", port, "lo", slot.hostname, slot.local_rank)  # once is enough
        manager.register_listener(Ear(slot.rank))
        assert ask(slot) == slot.to_response_string()
        if slot.rank == 0:
            found.set({"a": 2, "b": 2})
            until(lambda: len(heard[0]) == 1)
            found.set({"b": 2})
        until(lambda: len(heard[0]) == 2)
        return 0, time.time()

    one.start(2, run)
    assert codes(one) == {"a[0]": 0, "a[1]": 0}
    (first, added), (second, removed) = heard[0]
    assert (added, removed) == (worker.HostUpdateResult.added, worker.HostUpdateResult.removed)
    assert second > first and heard[1] == []


def test_a_driver_unpickles_nothing_that_a_stranger_sends(make: Any) -> None:
    server = http_server.RendezvousServer()
    one = make({"a": 2}, rendezvous=server)
    port = server.start(rendezvous.create_rendezvous_handler(one))
    touched: list[int] = []

    class Bomb:
        def __reduce__(self) -> Any:
            return touched.append, (1,)

    for body in (pickle.dumps(Bomb()), b"[1]", b"\xff", http_client.encode(({}, "no bytes"))):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/worker_addresses/a:0", data=body, method="PUT"
        )
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=LIMIT_S)
    key = secret.make_secret_key()
    forged = network.BasicService(worker.WorkerNotificationService.NAME, key, ["lo"])  # answers with a pickle
    try:
        with pytest.raises(network.NoValidAddressesFound):
            worker.WorkerNotificationClient(forged.addresses(), key)
    finally:
        forged.shutdown()
    assert not touched and one.get_worker_client(SlotInfo("a", 0, 0, 0, 1, 1, 1)) is None


def test_values_of_a_server_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    server = http_server.RendezvousServer()
    with pytest.raises(RuntimeError, match="call start"):
        server.init([])
    server.stop()
    port = server.start()
    value = {"a": [1, 2.5, None, True], 3: ("x", b"\x00\xff")}
    delete = lambda key: urllib.request.urlopen(  # noqa: E731
        urllib.request.Request(f"http://127.0.0.1:{port}/{key}", method="DELETE"), timeout=LIMIT_S
    )
    try:
        http_client.put_data_into_kvstore("127.0.0.1", port, "mine", "k", value)
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "mine", "k") == value
        delete("mine/k")
        with pytest.raises(RuntimeError, match="Read data from KVStore server failed"):
            http_client.read_data_from_kvstore("127.0.0.1", port, "mine", "k")
        with pytest.raises(TypeError, match="type set does not travel"):
            http_client.put_data_into_kvstore("127.0.0.1", port, "mine", "k", {1})
        server.init([SlotInfo("a", rank, rank, 0, 2, 2, 1) for rank in range(2)])
        http_client.put_data_into_kvstore("127.0.0.1", port, "global", "0", "here")
        for _ in range(2):
            delete("global/0")  # the same rank twice is one rank
            assert http_client.read_data_from_kvstore("127.0.0.1", port, "global", "0") == "here"
        delete("global/1")
        with pytest.raises(RuntimeError):
            http_client.read_data_from_kvstore("127.0.0.1", port, "global", "0")
        monkeypatch.setattr(http_server, "LARGEST_VALUE_BYTES", 10)
        with pytest.raises(RuntimeError, match="Put data"):
            http_client.put_data_into_kvstore("127.0.0.1", port, "mine", "k", "x" * 20)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            delete("no-scope")
    finally:
        server.stop()
        server.stop()
    kept = http_server.KVStoreServer(verbose=0)
    port = kept.start_server()
    http_client.put_data_into_kvstore("127.0.0.1", port, "s", "k", 7)
    assert http_client.read_data_from_kvstore("127.0.0.1", port, "s", "k") == 7
    kept.shutdown_server()


# --- processes that train


def shell(command: str, slot: SlotInfo, events: list[threading.Event], out: Any) -> tuple[int, float]:
    """What an integration does with a line: runs it, and ends it when an event is set."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec env {command}"], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    )
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        if any(event.is_set() for event in events) or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.01)
    code = process.returncode
    return (128 - code if code < 0 else code), time.time()


def line(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


@pytest.fixture
def python_path() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(STEPS.parents[2])}


def test_processes_that_a_driver_starts_go_on_when_one_is_lost(
    tmp_path: Path, python_path: dict[str, str]
) -> None:
    """As an integration would: a line for each process, and two names of this host for two hosts."""
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    wishes = ElasticSettings(
        FixedHosts({"localhost": 2, "127.0.0.1": 1}), 1, 3, elastic_timeout=LIMIT_S, num_proc=3
    )

    def run(command: str, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        # A file for each process: unbuffered, Python writes a line in pieces, and those of two processes would mix.
        with (tmp_path / f"{slot.hostname}.{slot.local_rank}.out").open("ab", buffering=0) as file:
            return shell(command, slot, events, file)

    def said() -> str:
        return "".join(out.read_text() for out in tmp_path.glob("*.out"))

    def kill() -> None:
        until(lambda: re.search(r"step [3-9]", said()))
        pid = re.search(r"generation 1 rank 2 of 3 pid (\d+)", said())
        assert pid is not None
        os.kill(int(pid.group(1)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    gloo_run.launch_gloo_elastic(
        line(STEPS, 30, 0.02), run, wishes, python_path, lambda one: ["lo"], http_server.RendezvousServer()
    )
    killer.join(LIMIT_S)
    text = said()
    assert "generation 2 rank 0 of 2" in text and "generation 2 rank 1 of 2" in text, text
    assert len(re.findall(r"^done \d 2 30", text, re.MULTILINE)) == 2 and "of 3 pid" in text


def test_a_driver_says_which_process_failed_first(python_path: dict[str, str], tmp_path: Path) -> None:
    wishes = ElasticSettings(FixedHosts({"localhost": 2}), 2, 2, elastic_timeout=LIMIT_S, num_proc=2)
    given = (wishes, python_path, lambda one: ["lo"], http_server.RendezvousServer())
    run = lambda command, slot, events: shell(command, slot, events, subprocess.DEVNULL)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"Process name: localhost\[\d\]\nExit code: 5"):
        gloo_run.launch_gloo_elastic(line("-c", "raise SystemExit(5)"), run, *given)


def test_a_job_of_a_fixed_size_by_a_function_that_starts_a_process(
    tmp_path: Path, python_path: dict[str, str]
) -> None:
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    program = "import numpy, horoclone as h; h.init(); print(h.allreduce(numpy.ones(1), op=h.Sum, name='x'))"
    wishes = Settings(hosts="localhost:1,127.0.0.1:1", num_proc=2)

    def run(command: str, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        with (tmp_path / str(slot.rank)).open("wb") as file:
            return shell(command, slot, events, file)

    gloo_run.launch_gloo(line("-c", program), run, wishes, ["lo"], python_path, "127.0.0.1")
    assert [(tmp_path / name).read_text() for name in "01"] == ["[2.]\n", "[2.]\n"]
    with pytest.raises(RuntimeError, match="Process name: 1\nExit code: 4"):
        program = "import os, time; time.sleep(60 * (os.environ['HOROVOD_RANK'] == '0')); os._exit(4)"
        gloo_run.launch_gloo(line("-c", program), run, wishes, ["lo"], python_path, "127.0.0.1")


def test_horovods_function_for_elastic_jobs_starts_one(launch: Any) -> None:
    program = f"""
import os, sys
from horoclone.runner.elastic.discovery import FixedHosts
from horoclone.runner.elastic.settings import ElasticSettings
from horoclone.runner.gloo_run import gloo_run_elastic
settings = ElasticSettings(FixedHosts({{"localhost": 2}}), 1, 2, elastic_timeout=60, num_proc=2)
gloo_run_elastic(settings, dict(os.environ), {shlex.join(line(STEPS, 3))!r})
try:
    gloo_run_elastic(settings, dict(os.environ), [sys.executable, "-c", "raise SystemExit(3)"])
except RuntimeError as error:
    print("RuntimeError", "Process name: localhost[" in str(error), "Exit code: 3" in str(error))
"""
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    done = launch(line("-c", program), env={"PYTHONPATH": str(STEPS.parents[2])}, timeout_s=LIMIT_S)
    assert len(re.findall(r"\]<stdout>:done \d 2 3", done.stdout)) == 2, done.stdout + done.stderr
    assert "RuntimeError True True" in done.stdout


def test_the_constants_of_the_module_hold_for_the_launcher_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from horoclone.launch import elastic_options
    from horoclone.launch.options import build_parser

    monkeypatch.setattr(driver, "ELASTIC_TIMEOUT_SECS", 7)
    found = elastic_options.elastic_of(
        build_parser("horovodrun").parse_args(["-np", "2", "--min-np", "1", "x"]), "horovodrun"
    )
    assert found is not None and found.timeout_s == 7.0
    assert elastic_options.patched("DISCOVER_HOSTS_FREQUENCY_SECS", 1.0) == 0.01
    monkeypatch.delitem(sys.modules, "horoclone.runner.elastic.driver")
    assert elastic_options.patched("DISCOVER_HOSTS_FREQUENCY_SECS", 1.0) == 1.0
