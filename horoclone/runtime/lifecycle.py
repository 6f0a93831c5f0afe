"""Starts and ends this process's runtime: init() and shutdown(). exit_hooks.py handles exit, exceptions and fork().

Thread: any, one at a time (current.lock).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from horoclone import errors, failpoints, selection
from horoclone import process_sets as sets
from horoclone.bootstrap import address_space, exchange, mpi_link
from horoclone.process_sets import ProcessSet
from horoclone.runtime import (
    attached,
    current,
    exit_hooks,
    joining_rank,
    logs,
    offspring,
    shared_metrics,
    stacks,
    steps,
    telemetry,
)
from horoclone.runtime.current import say
from horoclone.runtime.elastic_sets import ElasticProcessSets
from horoclone.runtime.gpu_libraries import with_libraries
from horoclone.runtime.member import ElasticMember
from horoclone.runtime.native_module import core, new_runtime
from horoclone.settings import check, flag, remarks, settings_of, start_timeout_s

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.bootstrap.exchange import Job
    from horoclone.runtime.phase_sampler import PhaseSampler

# Settings that a binding wishes for, by their whole names; what is set in the environment goes before. Read by init().
preferred: dict[str, str] = {}
member = ElasticMember()  # what this process is in an elastic job
elastic_sets = ElasticProcessSets()
_phases: PhaseSampler | None = None
_FORMING_S = 30.0  # for the members of a generation to connect: all of them are in init()
_MAX_GENERATIONS = 32  # lost one after the other before one init() gives up


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts the runtime and connects this process with all others of the job. Does nothing when it is already up, but
    raises ValueError where other ranks or process sets are asked for than there are.

    comm: None = every process that the launcher started; a list of their ranks = only those (in that order); an mpi4py
    communicator = its members. process_sets: sets to register at once, or "dynamic" to allow add_process_set.
    Raises ValueError for wrong arguments and settings; Timeout when ranks are missing after HOROCLONE_START_TIMEOUT
    seconds (300), naming them; Unsupported when the way in which this process was started cannot work. Process sets
    that cannot be (two with the same ranks, ranks outside the world: ValueError; others on another rank: Mismatch) are
    refused when everybody is connected: as in Horovod, rank() and size() answer then, and another init() needs
    shutdown() first.

    In a process that a rank has started, such as a data loader's worker that imports the script again, it does nothing:
    rank() and size() are that rank's, and operations say what to do.

    In an elastic job it waits for a generation that holds this process, and connects with its members; SystemExit when
    the others go on without this process or the job ends.
    """
    with current.lock:
        if current.forked_from is not None:
            raise current.forked_error()
        if current.runtime is not None:
            if not member.is_elastic():  # whose ranks and sets are others with each generation
                _check_again(comm, process_sets)
            return
        if offspring.recognise():
            return
        failpoints.check()
        exit_hooks.install_hooks(_finish, _shutdown, member.fails)
        wanted = _checked_process_sets(process_sets, comm)
        if member.is_elastic():
            _join_generation(comm, wanted)
            return
        exit_hooks.end_when_told()
        member.hear_signal()
        deadline = time.monotonic() + start_timeout_s(os.environ)
        current.job = exchange.open_job(comm, os.environ, deadline, say, current.job)
        current.named_ranks = _ranks_in(comm)
        _begin(_connect(current.job, deadline), wanted)


def _ranks_in(comm: Any) -> list[int]:
    """Those of init(comm=[...]); empty: it names none."""
    return [int(rank) for rank in comm] if hasattr(comm, "__iter__") else []


def _check_again(comm: Any, process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Of an init() though the runtime is up. ValueError where it asks for something else than what there is."""
    runtime = current.native()
    asked = _ranks_in(comm)
    if asked and asked != (current.named_ranks or list(range(runtime.size))):
        raise ValueError(
            f"init(comm={asked}): hvd.init() has been called already, and this process is rank {runtime.rank} of "
            f"{runtime.size}. Call hvd.shutdown() before, on every rank, or hvd.add_process_set() for a part of them."
        )
    if isinstance(process_sets, str):
        if not current.dynamic:
            raise ValueError(
                f"init(process_sets={process_sets!r}): hvd.init() has been called already, without it. Call "
                "hvd.shutdown() before, on every rank."
            )
        return
    wanted = _checked_process_sets(process_sets, comm)
    # A communicator's ranks are known once it is registered.
    if strange := [str(one) for one in wanted if one.mpi_comm is None and one.size() is None]:
        raise ValueError(
            f"init(process_sets=...): hvd.init() has been called already, without {', '.join(strange)}. Call "
            "hvd.add_process_set(), which needs init(process_sets='dynamic') at first, or hvd.shutdown() before, on "
            "every rank."
        )


def _begin(runtime: Runtime, wanted: list[ProcessSet]) -> None:
    """The ranks are connected: this is the runtime from now on, unless what they still have to agree on fails."""
    current.runtime = runtime
    offspring.mark(runtime)
    steps.restart()
    if current.job is not None:
        telemetry.begin(runtime, current.job)
    current.dynamic = flag(os.environ, "DYNAMIC_PROCESS_SETS")
    _remark()
    try:
        try:
            failpoints.reach("init.connected")
            if member.assignment is None:
                sets.on_init(runtime, wanted)
            else:
                elastic_sets.register(runtime, wanted, member.assignment)
        finally:
            attached.publish(runtime.address)  # after the sets: programs of an earlier life look for theirs
        _watch_phases(runtime)
    except (ValueError, errors.Mismatch):
        raise  # every rank refuses the sets alike, and the world is up: size() and rank() answer, as in Horovod
    except BaseException:
        shutdown()
        raise


def _watch_phases(runtime: Runtime) -> None:
    """Measures where this rank's time goes, where that is asked for; nothing of it is loaded otherwise."""
    global _phases
    if flag(os.environ, "WHY"):
        from horoclone.runtime.phase_sampler import PhaseSampler

        try:
            _phases = PhaseSampler(runtime, shared_metrics.note_phases)
        except RuntimeError as error:  # no thread can be started
            say(f"HOROCLONE_WHY=1: nothing is measured: {error}")


def _join_generation(comm: Any, wanted: list[ProcessSet]) -> None:
    """Connects with the next generation of an elastic job; where a member is lost meanwhile, with the one after it."""
    if comm is not None:
        raise ValueError(
            "init(comm=...): the ranks of an elastic job come and go; use hvd.add_process_set for a part of them."
        )
    attempt = 0
    while True:
        failpoints.reach("init.wait")
        began = time.monotonic()
        job = current.job = member.next_job()
        current.formed_s = time.monotonic() - began
        failpoints.reach("init.told")
        if member.assignment is not None:
            elastic_sets.renumber(member.assignment)
        attempt += 1
        try:
            runtime = _connect(job, time.monotonic() + _FORMING_S)
            member.connected()
            _begin(runtime, wanted)
            assignment = member.assignment
            if assignment is not None and assignment.number > 1 and assignment.previous[assignment.rank] < 0:
                joining_rank.refuse_collectives(assignment.number)
            return
        except (errors.Mismatch, errors.Unsupported):
            raise
        except errors.HorovodInternalError as error:
            if attempt >= _MAX_GENERATIONS:
                raise
            member.not_connected(error)
            elastic_sets.not_connected(wanted)
            say(f"generation {member.number()} could not be connected: {error}")


def _connect(job: Job, deadline: float) -> Runtime:
    """Opens a runtime and connects it with everybody's; on failure nothing of it stays open."""
    began = time.monotonic()
    check(os.environ)
    wished = {**preferred, **logs.settings(os.environ), **settings_of(os.environ)}
    settings = with_libraries(member.settings_of_generation(wished))
    known: dict[str, str] = {}
    if job.rank == 0:  # its choice holds for all
        known = selection.known_ways(os.environ)
        settings = selection.with_remembered(settings, os.environ, job.size)
    settings = address_space.fitted(job.listening(settings), os.environ, job.size)
    logs.begin(core())
    runtime = new_runtime(settings)
    try:
        stacks.watch_stack(runtime, os.environ)
        shared_metrics.share(runtime, job, os.environ)
        own = mpi_link.offer(os.environ, job.name, known)
        endpoints, offers = mpi_link.split(job.gather(own.around(runtime.endpoint()), deadline, say))
        if mpi_link.must_start(offers):
            mpi_link.start(deadline)
            own = mpi_link.offer(os.environ, job.name, known)
            _, offers = mpi_link.split(job.gather(own.around(b""), deadline, say))
        mpi = mpi_link.agree(offers, job.name, deadline)
        remaining_s = max(0.1, deadline - time.monotonic())
        with job.connecting() as look:
            failpoints.reach("init.gathered")
            runtime.connect(job.rank, endpoints, job.secret, job.name, job.generation, remaining_s, mpi, look)
        if job.rank == 0 and job.size > 1:
            key = mpi_link.key_of(offers) if runtime.local_size < job.size else ""
            selection.learn(os.environ, job.size, json.loads(runtime.counters()), key)
    except BaseException:
        try:
            runtime.shutdown(0.0)
        except errors.HorovodInternalError:
            pass  # the first error is the one to report
        raise
    current.connected_s = time.monotonic() - began
    return runtime


def _remark() -> None:
    """Rank 0 says once in its life which variables change nothing."""
    if not current.has_remarked and current.job is not None and current.job.rank == 0:
        current.has_remarked = True
        for line in remarks(os.environ, json.loads(core().knobs())):
            say(line)
        if flag(os.environ, "ELASTIC") and not member.is_elastic():
            say(
                "HOROVOD_ELASTIC=1 has no effect: only horoclonerun --min-np starts elastic jobs, or HOROCLONE_SERVICE"
            )


def _checked_process_sets(process_sets: Sequence[ProcessSet] | str | None, comm: Any) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"process_sets={process_sets!r}: the only word allowed is 'dynamic'; else pass a list."
            )
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        return []
    wanted = list(process_sets)
    for index, entry in enumerate(wanted):
        if not isinstance(entry, ProcessSet):
            raise ValueError(f"process_sets[{index}] is {entry!r}, not a ProcessSet.")
        if entry.mpi_comm is not None and isinstance(comm, (list, tuple)):
            raise NotImplementedError(
                "process sets made of communicators need init() or init(comm=<communicator>), not a list of ranks"
            )
    return wanted


def shutdown() -> None:
    """Finishes what this rank has submitted, says goodbye and closes everything. init() may follow. Never raises for
    what other ranks did. Programs of JAX that were dispatched run first. What can not be finished fails with Aborted on
    its handles: 5 s after every rank has called shutdown() or ended, or after 15 s while others go on."""
    if current.forked_from is not None:
        raise current.forked_error()
    _finish()
    _shutdown(exit_hooks.EXIT_DEADLINE_S)


def _finish() -> None:
    if (runtime := current.runtime) is not None:
        attached.finish(runtime)


def _shutdown(timeout_s: float) -> None:
    global _phases
    with current.lock:
        runtime, current.runtime = current.runtime, None
        if runtime is None:
            return
        if _phases is not None:
            _phases.stop()
            _phases = None
        elastic_sets.keep()
        sets.clear()
        attached.publish(0)
        try:
            runtime.shutdown(timeout_s)
        except errors.HorovodInternalError as error:
            say(f"shutdown: {error}")
        telemetry.end()
