"""Host lists, placement and the pure decisions of the launcher: no process is started here."""

from __future__ import annotations

import signal
import socket

import pytest

from horoclone.bootstrap.detect import BESIDE_OURS, torch_port
from horoclone.launch import frames, hosts, report, root_cause, termination
from horoclone.launch.environment import (
    exported,
    job_environment,
    rank_variables,
    thread_variables,
    torch_variables,
)
from horoclone.launch.hosts import Host, parse_hostfile, parse_hosts, place
from horoclone.launch.usage import LaunchError, parse_ranks, ranks_text


def test_a_host_list_gives_names_and_slots_in_order():
    assert parse_hosts("a:4,b, c.example.org:2") == [Host("a", 4), Host("b", 1), Host("c.example.org", 2)]
    assert parse_hosts("me@a:2,[::1]:3,fe80::1,10.0.0.2:8") == [
        Host("me@a", 2), Host("::1", 3), Host("fe80::1", 1), Host("10.0.0.2", 8)]  # fmt: skip


def test_a_host_named_twice_has_the_sum_of_its_slots():
    assert parse_hosts("a:1,b:2,a:3") == [Host("a", 4), Host("b", 2)]


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:0", "a:x", "a:-1", "-oProxyCommand=x", "a;b", "$(x)", "a b", "@a:1"]
)
def test_a_wrong_host_list_is_refused_with_the_text_itself(text):
    with pytest.raises(LaunchError, match="-H"):
        parse_hosts(text)


def test_hostfiles_of_open_mpi_mpich_and_horovod_are_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("\ufeffnode-a slots=4\n\nnode-b:2   # two\nnode-c\nnode-d slots=1 max_slots=8\n")
    assert parse_hostfile(str(file)) == [
        Host("node-a", 4),
        Host("node-b", 2),
        Host("node-c", 1),
        Host("node-d", 1),
    ]


@pytest.mark.parametrize("line, said", [
    ("a slots=many", "slots of a"), ("a slots", "not key=value"), ("a gpus=2", "unknown key 'gpus'"),
    ("a;b", "host name"),
])  # fmt: skip
def test_a_wrong_hostfile_line_is_named(tmp_path, line, said):
    file = tmp_path / "hosts"
    file.write_text(f"good slots=1\n{line}\n")
    with pytest.raises(LaunchError, match=said) as caught:
        parse_hostfile(str(file))
    assert "line 2" in str(caught.value)


def test_a_hostfile_that_is_empty_or_absent_is_an_error(tmp_path):
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("empty", "absent"):
        with pytest.raises(LaunchError, match=name):
            parse_hostfile(str(tmp_path / name))


def test_ranks_fill_hosts_in_order_with_local_and_cross_numbers():
    placed = place(5, [Host("a", 2), Host("b", 1), Host("c", 4)])
    assert [(p.host, p.rank, p.local_rank, p.local_size) for p in placed] == [
        ("a", 0, 0, 2), ("a", 1, 1, 2), ("b", 2, 0, 1), ("c", 3, 0, 2), ("c", 4, 1, 2)]  # fmt: skip
    # local rank 0 is on a, b and c; local rank 1 only on a and c
    assert [(p.cross_rank, p.cross_size) for p in placed] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_too_few_slots_name_the_numbers():
    with pytest.raises(LaunchError, match=r"-np 4 needs 4 slots.*have 3 \(a:2, b:1\)"):
        place(4, [Host("a", 2), Host("b", 1)])


def test_this_host_is_recognised_and_others_are_not():
    for name in ("localhost", "127.0.0.1", "127.0.0.77", "::1", socket.gethostname()):
        assert hosts.is_local(name), name
    for name in ("no-such-host.invalid", "198.51.100.7", "someone@localhost"):
        assert not hosts.is_local(name), name


def test_auto_takes_every_slot_else_devices_else_cores(monkeypatch):
    assert hosts.automatic_size([Host("a", 2), Host("b", 3)]) == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    assert hosts.automatic_size(None) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hosts.automatic_size(None) == hosts.usable_cores() >= 1


def test_a_rank_gets_every_number_under_both_names():
    variables = rank_variables(place(3, [Host("me@a", 2), Host("b", 1)])[1], "127.0.0.1:9,10.0.0.1:9", "job")
    for prefix in ("HOROCLONE_", "HOROVOD_"):
        found = [
            variables[prefix + name]
            for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        ]
        assert found == ["1", "3", "1", "2", "0", "1"]
    assert variables["HOROVOD_HOSTNAME"] == "a"
    assert (
        variables["HOROCLONE_RENDEZVOUS"] == "127.0.0.1:9,10.0.0.1:9" and variables["HOROCLONE_JOB"] == "job"
    )


def test_a_flag_beats_the_users_own_variable_under_either_name():
    environment = job_environment(
        {"HOROCLONE_CYCLE_TIME": "9", "HOROCLONE_SECRET_FD": "3"}, {"HOROVOD_CYCLE_TIME": "2"}
    )
    assert environment["HOROVOD_CYCLE_TIME"] == environment["HOROCLONE_CYCLE_TIME"] == "2"
    assert "HOROCLONE_SECRET_FD" not in environment and environment["PYTHONUNBUFFERED"] == "1"


def test_torchs_address_and_port_are_kept_one_by_one_where_they_are_the_users():
    rank = place(1, [Host("a", 1)])[0]
    ours = torch_variables(rank, 0, "a", "job", {"MASTER_PORT": ""})
    assert ours["MASTER_ADDR"] == "a" and ours["MASTER_PORT"] == str(torch_port("job"))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environment = job_environment({name: "1234"}, {})
        found = {**environment, **torch_variables(rank, 0, "a", "job", environment)}
        mark = {BESIDE_OURS: f"0/1/{found['MASTER_PORT']}"}
        assert found == {"PYTHONUNBUFFERED": "1", **ours, name: "1234", **mark}
    for name in (
        "RANK",
        "TORCHELASTIC_RUN_ID",
        "HOROCLONE_JOB",
    ):  # in a rank of another job they are that job's
        environment = job_environment({"MASTER_ADDR": "b", "MASTER_PORT": "1", name: "3"}, {})
        assert not environment.keys() & {"MASTER_ADDR", "MASTER_PORT"}


def test_ranks_share_the_cores_unless_the_user_has_chosen():
    assert thread_variables({}, "auto", 2, 8) == {"OMP_NUM_THREADS": "4"}
    assert thread_variables({}, "auto", 16, 8) == {"OMP_NUM_THREADS": "1"}
    assert (
        thread_variables({}, "auto", 1, 8) == {} == thread_variables({"OMP_NUM_THREADS": "3"}, "auto", 2, 8)
    )
    assert thread_variables({}, "off", 2, 8) == {}
    assert thread_variables({"OMP_NUM_THREADS": "3"}, "5", 2, 8) == {"OMP_NUM_THREADS": "5"}


def test_what_belongs_to_this_host_or_is_secret_stays_here():
    ours = {
        "HOME": "/h",
        "SSH_AUTH_SOCK": "s",
        "HOROCLONE_SECRET": "x",
        "BASH_FUNC_f%%": "() {",
        "DATA": "/d",
        "PATH": "/p",
    }
    assert exported(ours) == {"DATA": "/d", "PATH": "/p"}


def test_rank_lists_are_read_and_written():
    assert parse_ranks("0,3,5-7") == {0, 3, 5, 6, 7}
    assert ranks_text([9, 3, 7, 8]) == "ranks 3,7-9" and ranks_text([4]) == "rank 4"
    for text in ("", "a", "3-1", "-1", "1,,2"):
        with pytest.raises(LaunchError):
            parse_ranks(text)


def test_frames_survive_any_cut_and_a_chatty_login_shell():
    sent = (
        b"Welcome!\n"
        + frames.GREETING
        + frames.frame(frames.OUT, 3, b"x" * 1000)
        + frames.frame(frames.GONE, 4)
    )
    for step in (1, 7, 1000, len(sent)):
        reader = frames.FrameReader(frames.GREETING)
        found = [one for at in range(0, len(sent), step) for one in reader.feed(sent[at : at + step])]
        assert found == [(frames.OUT, 3, b"x" * 1000), (frames.GONE, 4, b"")]
        assert reader.noise == b"Welcome!\n" and reader.greeted


def test_a_huge_length_is_refused_before_anything_is_kept():
    reader = frames.FrameReader()
    with pytest.raises(frames.BrokenFrame):
        reader.feed(b"O" + b"\x00" * 4 + b"\xff" * 4)


# --- termination


def _orders(end: termination.TerminationPolicy, until: float) -> list[tuple[float, int, bool]]:
    found = []
    while (at := end.next_s()) is not None and at <= until:
        found += [(order.at_s, order.number, order.group) for order in end.due(at)]
    return found


def test_after_a_failure_the_others_get_five_seconds_then_term_then_grace_then_kill():
    end = termination.TerminationPolicy(30.0)
    end.fail(100.0)
    end.fail(101.0)  # the second failure changes nothing
    assert _orders(end, 1000) == [(105.0, signal.SIGTERM, False), (135.0, signal.SIGKILL, True)]
    assert end.reason == termination.FAILURE and end.exit_code is None


def test_control_c_ends_everything_within_three_seconds_and_the_second_at_once():
    end = termination.TerminationPolicy(30.0)
    assert end.interrupt(10.0)
    assert [order[:2] for order in _orders(end, 10.5)] == [(10.0, signal.SIGINT)]
    assert not end.interrupt(10.6)
    assert _orders(end, 11) == [(10.6, signal.SIGKILL, True)]
    assert end.exit_code == 130 and end.next_s() is None


def test_sigterm_keeps_its_code_when_control_c_hastens_it():
    end = termination.TerminationPolicy(30.0)
    end.terminate(0.0, signal.SIGTERM)
    end.terminate(1.0, signal.SIGTERM)
    assert end.interrupt(2.0)
    assert _orders(end, 99)[-1] == (4.0, signal.SIGKILL, True)
    assert end.exit_code == 143


# --- root causes


def _end(rank: int, code: int, at: float, **rest) -> report.RankEnd:
    facts = {"by_us": False, "report": None, "report_is_consequence": False, "stderr": []}
    return report.RankEnd(rank=rank, host="h", pid=100 + rank, code=code, ended_s=at, **{**facts, **rest})


def test_the_culprit_is_not_who_noticed_first():
    lost = ["Traceback (most recent call last):", '  File "x"', "horoclone.errors.PeerLost: rank 2 died"]
    ends = [
        _end(0, 1, 1.0, stderr=lost),
        _end(1, 1, 1.1, report="Traceback\nhoroclone.errors.Aborted: x", report_is_consequence=True),
        _end(2, 3, 1.2),
        _end(3, -15, 6.0, by_us=True),
    ]
    found = report.culprit(ends)
    assert found is not None and found.rank == 2


def test_a_users_error_with_such_words_is_no_consequence():
    own = ("RuntimeError: upload Aborted: disk full", "Aborted: no more retries", "ValueError: a PeerLost")
    assert not any(report.is_consequence(_raised(0, error)) for error in own)
    for error in (
        "InternalError: Aborted: allreduce 'x': rank 1 raised KeyError",
        "horoclone.errors.PeerLost: x",
    ):
        assert report.is_consequence(_raised(0, error)), error


def test_ranks_of_an_elastic_job_and_of_a_process_group_are_counted_as_those_of_their_errors():
    ends = [_raised(slot, MISMATCH.replace("rank 2", "rank 1")) for slot in range(3)]
    for slot, number in enumerate((1, 2, 0)):
        ends[slot] = ends[slot]._replace(in_errors=number)
    found = report.culprit(ends)
    assert found is not None and found.rank == 0, "slot 0 has rank 1"
    text = f"{MISMATCH} (rank 0 of the process group is rank 1 of the job, rank 2 of the process group is rank 5 of the job)"
    assert root_cause.root_cause_ranks(text) == [5]


def test_a_signal_is_more_of_a_cause_than_an_exit_code():
    found = report.culprit([_end(0, 1, 1.0), _end(1, -9, 1.1)])
    assert found is not None and found.rank == 1
    assert report.culprit([_end(0, 0, 1.0)]) is None


def test_the_report_has_the_cause_first_and_last_and_the_traceback_once():
    stderr = [
        "warming up",
        "Traceback (most recent call last):",
        '  File "t.py", line 3',
        "ValueError: bad batch 17",
        "bye",
    ]
    ends = [
        _end(0, 1, 2.0, stderr=["horoclone.errors.PeerLost: x"], by_us=True),
        _end(1, 7, 1.0, stderr=stderr),
        _end(2, 0, 0.5),
    ]
    text, code = report.failure_report(ends, "/logs")
    lines = text.splitlines()
    assert code == 7
    assert lines[0] == "rank 1 (h, pid 101) ended with exit code 7"
    assert text.count("ValueError: bad batch 17") == 1
    assert lines[-1] == ("root cause: rank 1 (h, pid 101) ended with exit code 7: ValueError: bad batch 17")
    assert text.count("Traceback (most recent call last):") == 1
    assert "    | warming up" in lines and "    | bye" in lines and "  logs of every rank: /logs" in lines
    assert "  rank 0 was stopped because of this." in lines


def _raised(rank: int, error: str, at: float = 1.0, code: int = 1, **rest) -> report.RankEnd:
    text = f'Traceback (most recent call last):\n  File "t.py", line 3\n{error}\n'
    return _end(rank, code, at, report=text, **rest)


def test_one_error_of_all_ranks_is_shown_once_and_nobody_was_stopped_by_it():
    ends = [_raised(rank, "ValueError: bad learning rate", 1.0 + rank / 10) for rank in range(8)]
    text, code = report.failure_report(ends, None, 8)
    lines = text.splitlines()
    assert code == 1 and lines[0] == "all 8 ranks ended with exit code 1"
    assert text.count("ValueError: bad learning rate") == 1
    assert lines[-1] == "root cause: all 8 ranks raised ValueError: bad learning rate"
    assert "stopped because" not in text and text.count("Traceback") == 1 and len(lines) < 8
    some, _ = report.failure_report([*ends[:3], _end(3, 0, 2.0)], None, 4)
    assert some.splitlines()[0] == "ranks 0-2 ended with exit code 1"


def test_ranks_that_failed_by_themselves_are_not_said_to_have_been_stopped():
    ends = [
        _raised(0, "ValueError: bad batch", 1.0),
        _raised(1, "KeyError: 'lr'", 1.1, 3),
        _raised(
            2,
            "horoclone.errors.Aborted: rank 0 raised ValueError: bad batch",
            1.2,
            report_is_consequence=True,
        ),
        _end(3, 9, 1.3),
        _raised(4, "KeyError: 'lr'", 1.4, 3),
        _end(5, -15, 7.0, by_us=True),
    ]
    lines = report.failure_report(ends, None, 6)[0].splitlines()
    assert lines[0] == "rank 0 (h, pid 100) ended with exit code 1"
    assert "  ranks 2,5 were stopped because of this." in lines
    assert "  ranks 1,4 failed, too: ended with exit code 3: KeyError: 'lr'" in lines
    assert "  rank 3 failed, too: ended with exit code 9" in lines


MISMATCH = (
    "horoclone.errors.Mismatch: allreduce 'rank 0 announced': rank 2 announced float16[4], rank 0 announced float32[4]. "
    "Mismatched data types."
)


def test_a_mismatch_is_blamed_on_the_rank_that_its_text_names():
    ends = [_raised(rank, MISMATCH, 1.0 + rank) for rank in range(3)]
    found = report.culprit(ends)
    assert found is not None and found.rank == 2, "the first to end is not the one that differs"
    lines = report.failure_report(ends, None, 3)[0].splitlines()
    assert sum("horoclone.errors.Mismatch: " in line for line in lines) == 1
    assert lines[-1].startswith("root cause: rank 2 (h, pid 102), as all 3 ranks report: ")


def test_a_mismatch_of_two_ranks_is_blamed_on_neither():
    error = MISMATCH.replace("rank 2", "rank 1").replace(
        ", rank 0 announced float32", " and rank 0 announced float32"
    )
    text, _ = report.failure_report([_raised(rank, error, 2.0 - rank) for rank in range(2)], None, 2)
    assert text.splitlines()[-1].startswith("root cause: both ranks raised horoclone.errors.Mismatch: ")
    assert "about rank" not in text and root_cause.suffered(0, _raised(0, error).report.splitlines()) is None


STALL = """horoclone.errors.Aborted: stalled longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. One or more tensors were submitted. Stalled ops:
  allreduce.loss (61 s): missing {late}; ready {ready}
  rank 1 has nothing pending; its last call was allreduce 'missing rank 0', 60.9 s ago
    Stack (most recent call first):
      File "t.py", line 7 in <module>"""


def test_a_stall_is_not_blamed_on_the_ranks_that_wait():
    waits = {"error": STALL.format(late="ranks 1,3", ready="ranks 0,2"), "report_is_consequence": True}
    late = ["loading batch 7", "still loading"]
    ends = [
        _raised(0, **waits),
        _end(1, -15, 7.0, by_us=True, stderr=late),
        _raised(2, **waits),
        _end(3, -15, 7.0, by_us=True),
    ]
    text, code = report.failure_report(ends, None, 4)
    lines = text.splitlines()
    assert code == 1 and lines[0] == "ranks 0,2 ended with exit code 1"
    assert (
        "  the error is about rank 1 (h, pid 101)." in lines
        and "  the error is about rank 3 (h, pid 103)." in lines
    )
    assert "  last lines of rank 1's stderr:" in lines and "    | still loading" in lines
    assert (
        lines[-1].startswith("root cause: ranks 1,3, as ranks 0,2 report: ") and "stopped because" not in text
    )
    assert lines[-1].endswith(
        ": allreduce.loss (61 s): missing ranks 1,3; ready ranks 0,2; rank 1 has nothing pending; its last call was "
        "allreduce 'missing rank 0', 60.9 s ago"
    ), "who waits for what, and for how long; not where rank 1 stands, which is above"


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 10, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "t.py", line 6, in <module>
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "t.py", line 3, in a
      | ValueError: one: x
      +------------------------------------
    +---------------- 2 ----------------
    | KeyError: 'k'
    +------------------------------------""".splitlines()


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (
            ['  File "t.py", line 2', "SyntaxError: '(' was never closed"],
            "raised SyntaxError: '(' was never closed",
        ),
        (["/bin/python: No module named x"], "ended with exit code 1: /bin/python: No module named x"),
        (
            ["python: can't find '__main__' module in '/a'"],
            "ended with exit code 1: python: can't find '__main__' module in '/a'",
        ),
        (["usage: t.py", "t.py: error: what?"], "ended with exit code 1: t.py: error: what?"),
        (["a line of a log: of no matter"], "ended with exit code 1"),
        (GROUP, "raised ValueError: one: x"),
    ],
)
def test_what_ended_ranks_without_a_traceback_is_in_the_last_line(said, verdict):
    text, _ = report.failure_report([_end(rank, 1, 1.0, stderr=said) for rank in range(2)], None, 2)
    assert text.splitlines()[-1] == f"root cause: both ranks {verdict}"


def test_a_backend_that_was_not_imported_is_named():
    text, _ = report.failure_report([_raised(0, "AssertionError: Unknown backend type horoclone")], None, 1)
    assert 'hint: torch knows the backend after "import horoclone.torch"' in text


def test_ranks_that_wait_for_each_other_blame_nobody():
    both = (
        STALL.format(late="rank 1", ready="rank 0") + "\n  allreduce.b (58 s): missing rank 0; ready rank 1"
    )
    ends = [_raised(rank, both, 1.0 + rank, report_is_consequence=True) for rank in range(2)]
    lines = report.failure_report(ends, None, 2)[0].splitlines()
    assert lines[-1].startswith("root cause: both ranks raised horoclone.errors.Aborted: stalled")
    assert root_cause.root_cause_ranks("PeerLost: rank 3 (node-b, pid 812) has ended") == [3]
    assert root_cause.root_cause_ranks("ValueError: 'rank 3 announced' is no name") == []


def test_a_stopped_rank_is_the_root_cause_of_who_gave_it_up():
    lost = "horoclone.errors.PeerLost: rank 1 (h, pid 101) has not responded for 15 s (stopped? swapped out?)"
    ends = [_raised(0, lost, report_is_consequence=True), _end(1, -9, 40.0, by_us=True)]
    lines = report.failure_report(ends, None, 2)[0].splitlines()
    assert lines[-1].startswith("root cause: rank 1 (h, pid 101), as rank 0 reports: ")


def test_a_chained_traceback_is_taken_whole():
    chain = [
        "x", "Traceback (most recent call last):", "  a", "KeyError: 1", "",
        "During handling of the above exception, another exception occurred:", "",
        "Traceback (most recent call last):", "  b", "ValueError: 2", "after",
    ]  # fmt: skip
    assert report.traceback_in(chain) == chain[1:-1]


def test_a_kill_is_explained_by_the_memory_counter():
    risen, not_risen = report.hint(_end(0, -9, 1.0, memory_kills=1)), report.hint(_end(0, -9, 1.0))
    assert risen is not None and "out of memory" in risen
    assert not_risen is not None and "not in the launcher's cgroup" in not_risen
    assert report.exit_code(-9) == 137 and report.signal_name(11) == "SIGSEGV"


def test_what_another_rank_saw_names_the_tensor_of_a_killed_one():
    lost = "Traceback (most recent call last):\n  x\nhoroclone.errors.PeerLost: allreduce 'w.3': rank 1 closed its connection"
    text, code = report.failure_report([_end(0, 1, 1.0, report=lost), _end(1, -9, 1.1)], None)
    assert code == 137 and "as rank 0 saw it: horoclone.errors.PeerLost: allreduce 'w.3'" in text


def test_a_rank_that_left_in_order_is_the_verdict_where_the_others_name_it():
    gone = "horoclone.errors.Aborted: allreduce 'w': Horovod has been shut down: rank 1 (h, pid 101) has shut down"
    for error in (
        gone,
        f"RuntimeError: Cannot extract tensors from value: {gone.removeprefix('horoclone.errors.')}",
    ):
        stderr = ["Traceback (most recent call last):", '  File "t.py", line 3', error]
        ends = [_end(0, 1, 3.0, stderr=stderr), _end(1, 0, 2.0)]
        lines = report.failure_report(ends, None, 2)[0].splitlines()
        assert lines[-1].startswith(
            "root cause: rank 1 (h, pid 101) ended with exit code 0 while others still had work: every rank must take part"
        )
        assert f"    | {error}" in lines, "which the verdict has not"
        assert len(report.failure_report(ends, None, 2, {0})[0].splitlines()) == 2


def test_an_exit_code_that_a_program_chose_is_told_from_an_error():
    told = [
        report.failure_report([_end(0, 3, 1.0, stderr=["a log"]), _raised(1, "ValueError: x")], None, 2)[0]
    ]
    told.append(report.failure_report([_raised(0, "ValueError: x")], None, 1)[0])
    assert ["the program chose this code itself (sys.exit, os._exit)" in one for one in told] == [True, False]


def test_an_error_raised_from_another_is_told_with_that_and_no_lost_peer_is_a_cause():
    """Where the user's code turns every error into one of its own, all ranks seemed to have failed by themselves."""
    chain = (
        "{}\n\nThe above exception was the direct cause of the following exception:\n\n"
        + _raised(0, "RuntimeError: step failed").report
    )
    suffered = chain.format("horoclone.errors.Aborted: rank 1 raised RuntimeError: step failed")
    ends = [
        _raised(0, suffered, 1.0),
        _raised(1, chain.format("ValueError: bad batch"), 1.1),
        _raised(2, suffered, 1.2),
    ]
    lines = report.failure_report(ends, None, 3)[0].splitlines()
    assert lines[-1] == (
        "root cause: rank 1 (h, pid 101) ended with exit code 1: RuntimeError: step failed (from ValueError: bad batch)"
    )
    assert "  ranks 0,2 were stopped because of this." in lines
    ends = [_raised(rank, chain.format(MISMATCH)) for rank in range(3)]
    assert "root cause: rank 2 (h, pid 102), as all 3" in report.failure_report(ends, None, 3)[0]


def test_a_rank_that_left_early_is_named_when_nobody_else_is_to_blame():
    lost = ["Traceback (most recent call last):", "horoclone.errors.PeerLost: rank 1 left"]
    text, code = report.failure_report([_end(0, 1, 3.0, stderr=lost), _end(1, 0, 2.0)], None)
    assert code == 1 and "rank 1 ended with exit code 0 while others" in text
