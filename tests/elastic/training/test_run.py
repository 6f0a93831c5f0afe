"""The loop of elastic.run, with fakes of what begins a generation: what is restored, synchronised, and left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from horoclone import errors
from horoclone.elastic.notice import HostUpdateResult
from horoclone.elastic.run import run_fn
from horoclone.elastic.state import ObjectState
from horoclone.errors import HorovodInternalError, HostsUpdatedInterrupt, PeerLost


class Watched(ObjectState):
    """Writes down what is done with it."""

    def __init__(self, **attributes: Any) -> None:
        self.log: list[str] = []
        super().__init__(lambda obj: obj, lambda: 0, **attributes)

    def save(self) -> None:
        self.log.append("save")
        super().save()

    def restore(self) -> None:
        self.log.append("restore")
        super().restore()

    def sync(self) -> None:
        self.log.append("sync")
        super().sync()

    def reset(self) -> None:
        self.log.append("reset")


def script(*steps: Any) -> Callable[..., Any]:
    """A function whose calls raise, call or return the steps, one after the other."""
    waiting = list(steps)

    def next_step(*_: Any) -> Any:
        step = waiting.pop(0) if waiting else None
        if isinstance(step, BaseException):
            raise step
        return step(*_) if callable(step) else step

    return next_step


def lost(rank: int = 1) -> PeerLost:
    return PeerLost(f"rank {rank} is gone", rank)


def test_a_value_comes_back_and_arguments_go_in() -> None:
    def train(state: Any, a: int, b: int = 0) -> tuple[int, int]:
        """Trains."""
        return a, b

    state, wrapped = Watched(), run_fn(train, lambda: None)
    assert wrapped(state, 1, b=2) == (1, 2) and wrapped.__doc__ == "Trains." and state.log == ["sync"]


def test_a_lost_rank_means_restore_reset_and_sync() -> None:
    state, resets = Watched(epoch=0), []

    def fail(state: Any) -> None:
        state.epoch = 3
        state.commit()
        state.epoch = 4
        raise lost()

    train = run_fn(script(fail, lambda state: state.epoch), lambda: resets.append(state.epoch))
    assert train(state) == 3
    assert resets == [3] and state.log == ["sync", "save", "restore", "reset", "sync"]


def test_an_interrupt_loses_nothing(job: Any) -> None:
    state = Watched(epoch=0)
    job.becomes(2)

    def interrupted(state: Any) -> None:
        state.epoch = 4
        state.on_hosts_updated(3, HostUpdateResult.added)
        state.check_host_updates()

    train = run_fn(script(interrupted, lambda state: state.epoch), lambda: job.becomes(3, newcomers=(1,)))
    assert train(state) == 4
    # What was not committed becomes a commit: a rank that fails now goes back, and must not meet others further on.
    assert state.log == ["sync", "save", "reset", "sync"]


def test_out_of_a_commit_nothing_is_saved_twice(job: Any) -> None:
    state = Watched()

    def interrupted(state: Any) -> None:
        state.on_hosts_updated(2, HostUpdateResult.removed)
        state.commit()

    run_fn(script(interrupted), lambda: job.becomes(2, skip_sync=True))(state)
    assert state.log == ["sync", "save", "reset"]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_the_generation_says_whether_there_is_a_sync_not_the_rank(
    job: Any, removed: bool, skip: bool
) -> None:
    """Survivors that waited for others to take the places of the lost have newcomers, whatever they were told."""
    state = Watched()
    train = run_fn(script(HostsUpdatedInterrupt(skip_sync=removed)), lambda: job.becomes(2, skip_sync=skip))
    train(state)
    assert state.log.count("sync") == (1 if skip else 2)


def test_outside_of_an_elastic_job_the_interrupt_says_it() -> None:
    for skip, syncs in ((True, 1), (False, 2)):
        state = Watched()
        run_fn(script(HostsUpdatedInterrupt(skip)), lambda: None)(state)
        assert state.log.count("sync") == syncs and "restore" not in state.log


def test_failures_while_beginning_a_generation_are_failures_as_others(job: Any) -> None:
    state = Watched(epoch=1)
    state.register_reset_callbacks([script(lost(2), None)])
    reset = script(lost(3), errors.Timeout("rank 4 did not come"), HostsUpdatedInterrupt(), None, None)
    assert run_fn(script(lost(1), "done"), reset)(state) == "done"
    assert state.log.count("restore") == 4 and state.log[-2:] == ["reset", "sync"]


def test_a_failure_in_sync_goes_round_again() -> None:
    class Breaks(Watched):
        fail = script(lost(), None)

        def sync(self) -> None:
            super().sync()
            Breaks.fail()

    state = Breaks()
    assert run_fn(lambda state: "done", lambda: None)(state) == "done"
    assert state.log == ["sync", "restore", "reset", "sync"]


@pytest.mark.parametrize(
    "error",
    [errors.Mismatch("shapes"), errors.Unsupported("no"), errors.InvalidArgument("x"), ValueError("y")],
)
def test_what_is_worth_no_retry_leaves(error: Exception, job: Any) -> None:
    for func, reset in ((script(error), script()), (script(lost()), script(error))):
        state = Watched()
        with pytest.raises(type(error)) as raised:
            run_fn(func, reset)(state)
        assert raised.value is error


def test_a_job_of_a_fixed_size_ends_with_what_came_first() -> None:
    """The runtime may be gone by then, where the function has called shutdown() while it was left."""
    first, second = lost(1), errors.Timeout("rank 1 did not come")
    with pytest.raises(PeerLost) as raised:
        run_fn(script(first), script(second))(Watched())
    assert raised.value is first and first.__cause__ is second


def test_where_init_is_left_to_run_its_failure_is_told_and_not_that_it_was_left() -> None:
    absent, refused = errors.NotInitialized("use hvd.init()"), lost(1)
    reset = script(refused, AssertionError("it was tried again"))
    with pytest.raises(PeerLost) as raised:
        run_fn(script(absent), reset)(Watched())
    assert raised.value is refused


def test_another_error_while_a_generation_begins_shows_why_it_had_to() -> None:
    first, second = lost(1), OSError("no port is free")
    with pytest.raises(OSError, match="no port") as raised:
        run_fn(script(first), script(second))(Watched())
    assert raised.value.__context__ is first


def test_the_same_failure_without_progress_ends_the_job() -> None:
    state = Watched()
    calls = []

    def always(state: Any) -> None:
        calls.append(1)
        raise HorovodInternalError(f"loss is NaN in step {len(calls)}")

    with pytest.raises(
        HorovodInternalError, match=r"the same failure came 3 times without a commit.*NaN in step 3"
    ):
        run_fn(always, lambda: None)(state)
    assert len(calls) == 3


def test_a_commit_between_two_failures_is_progress_and_lost_ranks_are_never_the_same() -> None:
    def committed(state: Any) -> None:
        state.commit()
        raise HorovodInternalError("now and then")

    assert run_fn(script(*[committed] * 6, "done"), lambda: None)(Watched()) == "done"
    assert run_fn(script(*[lost() for _ in range(9)], "done"), lambda: None)(Watched()) == "done"


def test_ranks_between_whose_commits_one_was_lost_meet_at_the_older(job: Any) -> None:
    """The other survivor holds commits 2 and 3: it never came to 4."""
    state = Watched(epoch=0)

    def fail(state: Any) -> None:  # sync made commit 1
        for state.epoch in (2, 3, 4):
            state.commit()
        raise lost()

    def reset() -> None:
        assert job.offers[-1] == (3, 4)
        job.becomes(2, commit=3)

    assert run_fn(script(fail, lambda state: state.epoch), reset)(state) == 3


def test_a_rank_that_has_to_leave_does_so_at_the_interrupt(job: Any) -> None:
    state, resets = Watched(), []

    def noticed(state: Any) -> None:
        job.leaving = "SIGTERM"
        raise HostsUpdatedInterrupt()

    with pytest.raises(SystemExit) as ended:
        run_fn(script(noticed), lambda: resets.append(1))(state)
    assert ended.value.code == 0 and job.left == ["SIGTERM"] and resets == []


def test_a_listener_is_gone_when_run_ends(job: Any) -> None:
    from horoclone.elastic import run

    state = Watched()
    with pytest.raises(ZeroDivisionError):
        run_fn(lambda state: 1 // 0, lambda: None)(state)
    run.notification_manager.handle_hosts_updated(2, HostUpdateResult.added)
    assert state._host_messages.empty()
