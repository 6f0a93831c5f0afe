"""Commits for those who wait in init(), newcomers and spares: what is sent of a state while the others train, and how
one of them goes on from it when it is let in.

The ranks of a generation into which they come agree in one small allgather that everybody has the same commit, or is
being sent it: then the others train on, and who is new comes into their first collective when it has it. A commit is
offered when all ranks hold it, so that its number is never that of another. Thread: the one that trains; packing is
done by the one that sends.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

from horoclone import errors, failpoints
from horoclone.elastic import member
from horoclone.elastic.generation import generation
from horoclone.objects import pickler
from horoclone.runtime.lifecycle import member as process

Reduce = Callable[[Any], tuple[Any, ...]]

_reducers: list[tuple[type, Reduce]] = []


def reduce_with(kind: type, reduce: Reduce) -> None:
    """A framework says how values of its class are pickled: best as NumPy's arrays, whose memory is sent as it is."""
    _reducers.append((kind, reduce))


def packed(content: Any) -> list[Any]:
    """A pickle, and behind it the memory of the arrays in it, which is not copied."""

    class Pickler(pickler()):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            for kind, reduce in _reducers:
                if isinstance(value, kind):
                    return reduce(value)
            return super().reducer_override(value)

    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(content)
    return [stream.getvalue(), *(one.raw() for one in buffers)]


def unpacked(parts: Sequence[Any]) -> Any:
    """What packed() was given; the bytes come from a process that has proved the job's secret. (What cloudpickle has
    written loads cloudpickle where that is needed; its import takes 5 ms for which the others wait.)"""
    return pickle.loads(parts[0], buffers=parts[1:])


def offer(state: Any) -> None:
    """All ranks have agreed on a commit of this state: who waits shall have it, or hear that it cannot be had."""
    if not process.feeds():
        return
    number = state._commit_number
    content = state._slots.get(number) if _is_whole(state) else None
    process.offer_replica(number, lambda: [] if content is None else packed(content))


def finish(state: Any) -> None:
    """Training is over: where nothing was committed in this generation, who is new may still be waiting for it."""
    if process.feeds() and state._commit_number == generation().commit:
        process.finish_feeding()


def is_provisional() -> bool:
    """Whether a state that is made now will be replaced before training begins, as a commit of the others has come: the
    others stand still meanwhile, so it need not begin with a copy of its values."""
    return process.holds_replica()


def synchronise(state: Any) -> None:
    """state.sync(), or less where those who are new hold the commit at which the others are. A collective."""
    if not _all_have_it(state):
        state.sync()


def _all_have_it(state: Any) -> bool:
    """Whether every rank is at the commit with which this generation begins. Decided by all ranks alike."""
    if not process.is_elastic():
        return False
    now = generation()
    if not now.newcomers or len(now.newcomers) == now.size or not now.commit:
        return False
    if getattr(state, "_commit_number", 0) == now.commit and not process.digest_of_replica(now.commit):
        offer(state)  # it was lost between its save and its offer
    process.hurry_replica()
    is_new = now.rank in now.newcomers
    mine = (_promised if is_new else _held)(state, now.commit)
    try:
        everybody = member.told_by_all(mine, "hvd.elastic.replica")
    except errors.HorovodInternalError:
        if is_new and mine[1]:  # all others may be gone
            _take_over(state, now.commit, mine[1:2])
        raise
    digests = {told[1] for told in everybody if told[1]}
    feeder = everybody[0][2]
    if len(digests) > 1 or any(told[0] != now.commit or told[2] not in (0, feeder) for told in everybody):
        process.take_replica(waits=False)
        return False
    if is_new:
        _take_over(state, now.commit, digests)
        state.on_reset()  # as the others have done: the callbacks may have changed what the commit holds
    return True


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether it is the broadcast_object of this package, which takes a root and a name."""
    inner = function.func if isinstance(function, functools.partial) else function
    if str(getattr(inner, "__module__", "")).partition(".")[0] != "horoclone":
        return False
    return {"root_rank", "name"} <= set(inspect.signature(inner).parameters)


def _is_whole(state: Any) -> bool:
    """Whether what is sent is all that it keeps: a subclass may save more, a rank parts of its own, and what is kept by
    reference goes on changing. With one's own broadcast rank 0 may be here before others have saved.

    A callback may count on what its process has seen before. So a newcomer takes the state as the others have it behind
    their callbacks; only spares run them, as is said of them.
    """
    if (
        not hasattr(state, "_accepts")
        or state._own_parts()
        or state._uncopied
        or not is_ours(state._bcast_object)
    ):
        return False
    if state._reset_callbacks and not process.has_spares():
        return False
    methods = [getattr(type(state), name) for name in ("save", "restore", "sync", "reset", "on_reset")]
    return all(one.__module__.startswith("horoclone.") for one in methods)


def _held(state: Any, commit: int) -> tuple[int, int, int]:
    """The commit, its digest if this process has sent it, and process.feeder()."""
    is_there = _is_whole(state) and state._commit_number == commit
    return (commit, process.digest_of_replica(commit), process.feeder()) if is_there else (0, 0, 0)


def _promised(state: Any, commit: int) -> tuple[int, int, int]:
    """As _held(), of who is new: the digest if it has the commit, else who sends it; zeros where the commits that come
    are of a state that differs."""
    replica, feeder = process.promised_replica()
    if replica is None or not _is_whole(state):
        return 0, 0, 0
    try:
        if not replica.parts or not state._accepts(unpacked(replica.parts)):
            return 0, 0, 0
    except Exception:  # the sync that follows says in what it differs
        return 0, 0, 0
    if replica.commit == commit:
        return commit, replica.digest, 0
    return (commit, 0, feeder) if feeder and replica.commit < commit else (0, 0, 0)


def _take_over(state: Any, commit: int, digests: Collection[int]) -> None:
    """Gives the state the commit that has come or comes. PeerLost where it does not: another generation begins then, in
    which this process has no commit. ValueError where it is of a state that differs."""
    failpoints.reach("elastic.replica.wait")
    replica = process.take_replica()
    if (
        replica is None
        or not replica.parts
        or replica.commit != commit
        or (digests and replica.digest not in digests)
    ):
        raise errors.PeerLost(f"commit {commit}, on its way from rank 0, did not arrive", -1)
    before = state._content()
    try:
        content = unpacked(replica.parts)
        if not state._accepts(content):
            raise ValueError("it has other attributes, or a model or an optimizer of another form")
        state._set_content(content)
        state.restore()
    except Exception as error:
        state._set_content(before)
        raise ValueError(
            f"commit {commit} of the others does not fit the state of this process: {error}"
        ) from error
    state._slots, state._commit_number = {commit: state._content()}, commit
    member.offer_commits((commit,))
    failpoints.reach("elastic.replica.taken")
