"""Commits, restores and notices of an elastic state, and each way in which Horovod's loses something."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from horoclone.common import elastic
from horoclone.elastic import notice
from horoclone.elastic.notice import HostUpdateResult
from horoclone.elastic.state import ObjectState
from horoclone.errors import HostsUpdatedInterrupt
from horoclone.runtime.member import ElasticMember


def a_state(**attributes: Any) -> ObjectState:
    return ObjectState(lambda obj: obj, lambda: 0, **attributes)


def test_horovods_module_has_them_and_the_names_that_scripts_touch() -> None:
    assert elastic.ObjectState is ObjectState and issubclass(ObjectState, elastic.State)
    state = a_state(epoch=1)
    assert state._rank() == 0 and state._bcast_object(3) == 3 and state._reset_callbacks == []
    assert state._saved_state == {"epoch": 1} and state._host_messages.empty()
    state._last_updated_timestamp = 7  # scripts set it
    state.on_hosts_updated(7, HostUpdateResult.added)
    state.check_host_updates()
    for method in (elastic.State.save, elastic.State.restore, elastic.State.sync):
        with pytest.raises(NotImplementedError):
            method(elastic.State(lambda obj: obj, lambda: 0))


def test_what_is_inside_of_an_attribute_is_restored_too() -> None:
    history = [1]
    state = a_state(history=history, best={"loss": [3.0]})
    assert state.history is history  # what the script holds is what the state holds
    state.history.append(2)
    state.best["loss"].append(9.0)
    state.restore()
    assert state.history == [1] and state.best == {"loss": [3.0]}
    state.history.append(5)  # a restored value is no saved one
    state.restore()
    assert state.history == [1]
    state.history.append(2)
    state.commit()
    state.history.append(3)
    state.restore()
    assert state.history == [1, 2]


def test_attributes_that_share_a_value_share_it_after_a_restore() -> None:
    shared = [1]
    state = a_state(a=shared, b=shared)
    state.a.append(2)
    state.restore()
    assert state.a == [1] and state.a is state.b


def test_a_value_is_kept_by_reference_where_that_is_wished_or_unavoidable() -> None:
    table = [0]
    state = a_state(table=table, epoch=0)
    state.by_reference("table")
    state.table.append(1)
    state.save()
    state.table.append(2)
    state.restore()
    assert state.table is table and table == [0, 1, 2]
    with pytest.raises(ValueError, match=r"\['other'\] are none of this state's \['epoch', 'table'\]"):
        state.by_reference("other")
    with pytest.warns(UserWarning, match="'lock' of an elastic state cannot be copied"):
        state = a_state(lock=threading.Lock(), epochs=[0])
    lock = state.lock
    state.epochs.append(1)
    state.restore()
    assert state.lock is lock and state.epochs == [0]


def test_sync_takes_what_the_root_has_now_and_saves_it() -> None:
    """Not the root's saved values, which would mix weights of now with counters of the last commit."""
    sent = []

    def broadcast(obj: Any) -> Any:
        sent.append(obj)
        return {"epoch": 5, "history": [1, 2]}

    state = ObjectState(broadcast, lambda: 0, epoch=0, history=[])
    state.epoch = 4
    state.history.append(1)
    state.sync()
    assert sent == [{"epoch": 4, "history": [1]}]
    assert state.epoch == 5 and state.history == [1, 2]
    state.history.append(3)
    state.restore()
    assert state.epoch == 5 and state.history == [1, 2]


def test_a_state_without_attributes_sends_nothing() -> None:
    def never(obj: Any) -> Any:
        raise AssertionError("there is nothing to send")

    ObjectState(never, lambda: 0).sync()


def test_two_updates_in_one_second_are_two(job: Any) -> None:
    state = a_state()
    state.on_hosts_updated(2, HostUpdateResult.removed)
    state.on_hosts_updated(3, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is False and interrupt.value.committed
    state.commit()
    state.on_hosts_updated(3, HostUpdateResult.removed)  # it was heard already
    state.commit()
    state.on_hosts_updated(4, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.check_host_updates()
    assert interrupt.value.skip_sync is True and not interrupt.value.committed


def test_rank_0_decides_where_a_broadcast_of_your_own_is_used() -> None:
    answers = [(0, 0, 0), (0, 5, HostUpdateResult.removed)]
    state = ObjectState(lambda obj: answers.pop(0), lambda: 1)
    state.on_hosts_updated(4, HostUpdateResult.added)
    state.check_host_updates()  # rank 0 has not heard of it
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.check_host_updates()
    assert interrupt.value.skip_sync and state._last_updated_timestamp == 5


def test_callbacks_run_in_their_order_behind_reset(job: Any) -> None:
    order: list[str] = []

    class Mine(ObjectState):
        def reset(self) -> None:
            order.append("reset")

    state = Mine(lambda obj: obj, lambda: 0)
    state.register_reset_callbacks([lambda: order.append("a"), lambda: order.append("b")])
    state.register_reset_callbacks([lambda: order.append("c")])
    state.on_reset()
    assert order == ["reset", "a", "b", "c"]


def test_a_notice_for_a_later_generation_survives_the_reset(job: Any) -> None:
    """It came while this generation was being formed; its host waits at the door."""
    state = a_state()
    state.on_hosts_updated(2, HostUpdateResult.added)
    state.on_hosts_updated(3, HostUpdateResult.added)
    job.becomes(2)
    state.on_reset()
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    job.becomes(3)
    state.on_reset()
    state.check_host_updates()


def test_without_an_elastic_job_a_reset_drops_all_notices() -> None:
    state = a_state()
    state.on_hosts_updated(2, HostUpdateResult.added)
    state.on_reset()
    state.check_host_updates()


def test_two_commits_are_kept_and_offered(job: Any) -> None:
    state = a_state(epoch=0)
    assert state._held() == ()  # nobody else has what it was made with
    for epoch in (1, 2, 3):
        state.epoch = epoch
        state.commit()
    assert job.offers[-1] == (2, 3) and state._held() == (2, 3)
    state.epoch = 9
    state._step_back(2)
    assert state.epoch == 2 and job.offers[-1] == (2,)
    state.epoch = 10
    state.commit()
    assert job.offers[-1] == (2, 3)
    state.restore()
    assert state.epoch == 10
    state._step_back(1)  # not held: nothing changes
    assert state.epoch == 10 and state._held() == (2, 3)


def test_a_state_of_your_own_counts_its_commits(job: Any) -> None:
    class Mine(elastic.State):
        saved = value = 0

        def save(self) -> None:
            self.saved = self.value

        def restore(self) -> None:
            self.value = self.saved

    state = Mine(lambda obj: obj, lambda: 0)
    state.commit()
    state.commit()
    assert job.offers[-1] == (2,)
    state._keep()
    assert job.offers[-1] == (3,)
    state._step_back(2)
    assert state._commit_number == 3


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        self.heard.append((timestamp, update_res))


def test_notices_before_run_and_twice_registered_listeners_are_not_lost() -> None:
    board, ear = notice.NoticeBoard(), Ear()
    board.init("127.0.0.1", 1, None, None, None, None)  # as Horovod calls it; nothing to do in this job
    board.handle_hosts_updated(2, HostUpdateResult.removed)
    board.handle_hosts_updated(3, HostUpdateResult.added)
    board.register_listener(ear)
    board.register_listener(ear)
    assert ear.heard == [(3, HostUpdateResult.mixed)]
    board.handle_hosts_updated(4, HostUpdateResult.added)
    board.remove_listener(ear)
    board.handle_hosts_updated(5, HostUpdateResult.added)
    board.remove_listener(ear)
    board.remove_listener(ear)
    board.handle_hosts_updated(6, HostUpdateResult.added)
    assert [timestamp for timestamp, _ in ear.heard] == [3, 4, 5]


def test_a_state_that_cannot_take_a_notice_keeps_nobody_from_hearing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither other states, nor the thread that brings notices and shows the others that this process is alive."""

    class Deaf(Ear):
        def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
            raise RuntimeError("mine")

    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda what: told.append(str(what.exc_value)))
    board, ear, here = notice.NoticeBoard(), Ear(), ElasticMember()
    for listener in (Deaf(), ear):
        board.register_listener(listener)
    here.listen(board.handle_hosts_updated)
    here.tell_listeners(2, HostUpdateResult.added)
    assert ear.heard == [(2, HostUpdateResult.added)]
    assert told == ["mine"]


def test_the_board_asks_for_notices_once(job: Any) -> None:
    board = notice.NoticeBoard()
    board.init()
    board.init()
    assert job.listeners == [board.handle_hosts_updated]
