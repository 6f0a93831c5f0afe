"""Commits for those who wait in init(), newcomers and spares: what is sent of a state while the others train, and how
one of them goes on from it when it is let in.

The ranks of a generation into which they come agree in one small allgather that everybody has the same commit; then
nothing else travels. A commit is offered when all ranks hold it, so that its number is never that of another. Thread:
the one that trains; packing is done by the one that sends.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from horoclone.elastic import member
from horoclone.elastic.generation import generation
from horoclone.runtime.lifecycle import member as process

Reduce = Callable[[Any], tuple[Any, ...]]

_reducers: list[tuple[type, Reduce]] = []


def reduce_with(kind: type, reduce: Reduce) -> None:
    """A framework says how values of its class are pickled: best as NumPy's arrays, whose memory is sent as it is."""
    _reducers.append((kind, reduce))


def packed(content: Any) -> list[Any]:
    """A pickle, and behind it the memory of the arrays in it, which is not copied."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
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
    """What packed() was given; the bytes come from a process that has proved the job's secret."""
    import cloudpickle

    return cloudpickle.loads(parts[0], buffers=parts[1:])


def offer(state: Any) -> None:
    """All ranks have agreed on a commit of this state: who waits shall have it, or hear that it cannot be had."""
    if not process.feeds():
        return
    number = state._commit_number
    content = state._slots.get(number) if _is_whole(state) else None
    process.offer_replica(number, lambda: [] if content is None else packed(content))


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
    commit, digest = _take_over(state, now.commit) if now.rank in now.newcomers else _held(state, now.commit)
    everybody = member.told_by_all((commit, digest), "hvd.elastic.replica")
    digests = {told[1] for told in everybody if told[1]}
    if len(digests) != 1 or any(told[0] != now.commit for told in everybody):
        return False
    if now.rank in now.newcomers:
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
    methods = [getattr(type(state), name) for name in ("save", "restore", "sync", "reset")]
    return all(one.__module__.startswith("horoclone.") for one in methods)


def _held(state: Any, commit: int) -> tuple[int, int]:
    is_there = _is_whole(state) and state._commit_number == commit
    return (commit, process.digest_of_replica(commit)) if is_there else (0, 0)


def _take_over(state: Any, commit: int) -> tuple[int, int]:
    """Gives the state what came while this process waited; (0, 0) where that is another commit or does not fit."""
    replica = process.take_replica()
    if replica is None or replica.commit != commit or not _is_whole(state):
        return 0, 0
    try:
        content = unpacked(replica.parts)
        if not state._accepts(content):
            return 0, 0
        state._set_content(content)
        state.restore()
    except Exception:  # of a state that differs: the sync that follows says in what
        return 0, 0
    state._slots, state._commit_number = {commit: state._content()}, commit
    member.offer_commits((commit,))
    return commit, replica.digest
