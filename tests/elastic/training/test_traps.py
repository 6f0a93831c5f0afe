"""The twenty traps of Horovod's elastic training (docs/from_horovod.md): where each is tested, and here the rest."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from world import raised, ranks, until

from horoclone.elastic import member
from horoclone.elastic.notice import HostUpdateResult
from horoclone.elastic.sampler import ElasticSampler
from horoclone.elastic.state import ObjectState
from horoclone.errors import HostsUpdatedInterrupt
from horoclone.objects import broadcast_object
from horoclone.runtime import facts

HERE = Path(__file__).parent
RUN = [sys.executable, "-m", "horoclone.launch"]

TESTS = HERE.parents[1]
# Trap -> tests of it, below tests/. A trap that is kept has a test that it is.
NAMED = {
    1: ["elastic/training/test_state.py::test_what_is_inside_of_an_attribute_is_restored_too"],
    2: [
        "elastic/training/test_state.py::test_sync_takes_what_the_root_has_now_and_saves_it",
        "torch/test_elastic.py::test_sync_gives_what_the_root_has_now_and_ends_in_a_commit",
    ],
    3: [
        "elastic/training/test_run.py::test_the_generation_says_whether_there_is_a_sync_not_the_rank",
        "membership/test_coordinator.py::test_sync_is_skipped_only_when_all_hold_the_same_newest_commit_and_nobody_is_new",
        "elastic/test_newcomers.py::test_newcomers_go_on_from_what_they_were_given",
    ],
    4: [
        "elastic/training/test_traps.py::test_4_a_notice_that_only_another_rank_has_heard_interrupts_this_one",
        "elastic/training/test_traps.py::test_4_a_rank_that_does_not_commit_is_named_and_the_job_ends",
    ],
    5: ["elastic/training/test_state.py::test_two_updates_in_one_second_are_two"],
    6: [
        "elastic/training/test_run.py::test_failures_while_beginning_a_generation_are_failures_as_others",
        "elastic/training/test_run.py::test_what_is_worth_no_retry_leaves",
        "elastic/test_kills.py::test_one_is_lost_when_all_are_connected_and_init_has_not_returned",
    ],
    7: ["elastic/training/test_run.py::test_the_same_failure_without_progress_ends_the_job"],
    8: [
        "elastic/training/test_state.py::test_notices_before_run_and_twice_registered_listeners_are_not_lost"
    ],
    9: [
        "elastic/training/test_traps.py::test_9_10_12_a_rank_that_comes",
        "elastic/training/test_goes_along.py::"
        "test_a_collective_before_run_of_a_rank_that_comes_is_an_error_that_says_so",
    ],
    10: ["elastic/training/test_traps.py::test_9_10_12_a_rank_that_comes"],
    11: [
        "elastic/training/test_goes_along.py::test_everything_goes_on_with_the_ranks_that_are_left",
        "elastic/test_kills.py::test_a_process_set_lives_as_long_as_all_its_ranks",
    ],
    12: ["elastic/training/test_traps.py::test_9_10_12_a_rank_that_comes"],
    13: [
        "membership/test_coordinator.py::test_survivors_keep_their_order_without_a_wait_when_all_have_come",
        "elastic/test_kills.py::test_survivors_go_on_and_the_slots_get_new_workers",
        "elastic/test_kills.py::test_when_all_are_lost_the_job_ends_with_the_report_of_the_first",
    ],
    14: [
        "launch/test_elastic_policy.py::test_a_host_that_shrinks_loses_its_highest_slots_and_old_hosts_stay_first",
        "launch/test_elastic_policy.py::test_horovods_rule_closes_the_host_with_the_first_failure",
        "elastic/test_kills.py::test_under_horovods_name_the_first_failure_closes_the_host",
    ],
    15: [
        "membership/test_coordinator.py::test_the_first_generation_may_be_smaller_when_time_is_over",
        "launch/test_elastic_flags.py::test_what_is_not_said_is_as_in_horovod",
    ],
    16: [
        "membership/test_coordinator.py::test_when_one_has_finished_the_others_go_on_however_few_and_nobody_new_begins"
    ],
    17: [
        "launch/test_elastic_policy.py::test_a_cooldown_grows_as_horovods_and_is_not_made_longer_while_it_lasts",
        "launch/test_elastic_policy.py::test_limits_of_a_cooldown_are_horovods",
    ],
    18: [
        "launch/test_discovery.py::test_a_script_that_fails_says_what_it_said",
        "launch/test_command.py::test_user_errors_are_one_message_and_never_a_traceback",
        "elastic/test_faults.py::test_discovery_that_prints_nonsense_and_then_hangs_changes_nothing",
        "launch/test_discovery.py::test_lines_keep_their_order_and_each_host_counts_once",
    ],
    19: ["keras/test_elastic.py::test_the_order_of_the_callbacks_does_not_matter"],
    20: ["elastic/training/test_traps.py::test_20_fewer_samples_than_ranks_are_shared_out"],
}


def test_each_trap_of_the_page_has_tests_that_exist() -> None:
    page = (TESTS.parent / "docs" / "from_horovod.md").read_text()
    section = page.partition("## Elastic training, trap by trap")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)] == list(range(1, 21))
    assert list(NAMED) == list(range(1, 21))
    for name in sorted({name for names in NAMED.values() for name in names}):
        file, _, test = name.partition("::")
        found = ast.walk(ast.parse((TESTS / file).read_text()))
        assert test in {one.name for one in found if isinstance(one, ast.FunctionDef)}, name


def ours() -> ObjectState:
    return ObjectState(broadcast_object, lambda: 0, epoch=0)


def test_4_a_notice_that_only_another_rank_has_heard_interrupts_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Horovod only rank 0's notices count."""
    words: list[tuple[int, ...]] = []

    def told(mine: tuple[int, ...], _name: str) -> list[list[int]]:
        words.append(mine)
        return [list(mine), [0, 0, 0], [9, int(HostUpdateResult.added), 0]]

    monkeypatch.setattr(member, "told_by_all", told)
    state = ours()
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert words == [(0, 0, 0)] and interrupt.value.skip_sync is False
    assert state._last_updated_timestamp == 9
    monkeypatch.setattr(member, "told_by_all", lambda mine, _name: [list(mine), [0, 0, 1]])
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is True, "somebody leaves: that is a removal"


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return str(tmp_path / "mark")


@ranks(2, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"})
def test_4_a_rank_that_does_not_commit_is_named_and_the_job_ends(mark: str) -> None:
    state = ObjectState(broadcast_object, facts.rank, epoch=0)
    state.commit()
    if facts.rank() == 0:
        assert re.search(r"hvd\.elastic\.commit[^\n]*\b1\b", str(raised(state.commit)))
        Path(mark).touch()
    else:
        until(Path(mark).exists, 30, "rank 0 waits on")


def test_9_10_12_a_rank_that_comes(launch: Any, tmp_path: Path) -> None:
    """9: its collective before run is an error, and the job goes on. 10: its rate has the new size, and those who are
    left follow by the reset callback. 12: the variables are those of the start, hvd.rank() is that of now."""
    pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")
    command = [*RUN, "-np", "2", "--min-np", "1", "-H", "localhost:2", sys.executable]
    done = launch([*command, HERE / "traps.py", tmp_path], timeout_s=90)
    said = done.stdout
    assert "Mismatch: rank 1 has come to a running job" in done.stderr and "'weights'" in done.stderr, (
        done.output
    )
    alone = r"generation 2 of 1 rank 0 HOROVOD_RANK 1 HOROVOD_HOSTNAME localhost rate 0\.1 mine 0\.2 step 5"
    assert re.search(alone, said), done.output
    together = (
        r"of 2 rank (\d) HOROVOD_RANK (\d) HOROVOD_HOSTNAME localhost rate (0\.\d) mine 0\.2 step (\d+)"
    )
    last = [found for found in re.findall(together, said) if int(found[3]) > 5]
    assert {found[:3] for found in last} == {("0", "1", "0.2"), ("1", "0", "0.2")}, done.output
    assert re.findall(r"done \d of 2", said), done.output


@pytest.mark.parametrize("size, left", [(4, 1), (3, 2), (8, 0), (5, 4)])
def test_20_fewer_samples_than_ranks_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, size: int, left: int
) -> None:
    """Horovod's assertion fails for one sample on four ranks."""
    monkeypatch.setattr(facts, "size", lambda: size)
    taken = []
    for rank in range(size):
        monkeypatch.setattr(facts, "rank", lambda rank=rank: rank)
        sampler = ElasticSampler(range(10 + left), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": 10})
        taken.append(list(sampler))
    assert len({len(one) for one in taken}) == 1
    assert {index for one in taken for index in one} == set(range(10, 10 + left))
