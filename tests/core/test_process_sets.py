"""Process sets: coming and going, overlapping, from communicators, independent of each other, and what is refused."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from world import ranks, until

import horoclone as hvd

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def wait_for(path: Path, limit_s: float = 30.0) -> None:
    until(path.exists, limit_s, lambda: f"nobody has made {path}")


def total(value, process_set):
    return int(hvd.allreduce(np.array([value]), op=hvd.Sum, process_set=process_set)[0])


def still_works():
    assert total(1, hvd.global_process_set) == hvd.size()


@ranks(3, env=DYNAMIC)
def test_sets_come_and_go_hundreds_of_times_and_their_ids_are_used_again():
    seen = set()
    members = ([0, 1], [1, 2], [0, 2], [0], [1], [2])
    for turn in range(300):
        first = hvd.add_process_set(members[turn % 6])
        second = hvd.add_process_set(members[(turn + 1) % 6])
        seen |= {first.process_set_id, second.process_set_id}
        for mine in (second, first):
            if mine.included():
                assert total(hvd.rank(), mine) == sum(mine.ranks)
        for gone in (first, second) if turn % 2 else (second, first):
            assert hvd.remove_process_set(gone) is True
            assert (
                gone.process_set_id is None
                and gone.size() is None
                and gone.included() == (hvd.rank() in (gone.ranks or []))
            )
    assert seen == {1, 2}
    still_works()


@ranks(3, env=DYNAMIC)
def test_a_set_that_was_removed_can_be_added_again_and_names_belong_to_their_set():
    pair = hvd.ProcessSet([0, 1])
    for _ in range(3):
        assert hvd.add_process_set(pair) is pair and pair.process_set_id == 1
        assert hvd.remove_process_set(pair)
    everybody, pair = hvd.global_process_set, hvd.add_process_set(pair)
    if hvd.rank() < 2:  # one name, pending in two sets at once
        inner = hvd.allreduce_async(np.array([1]), name="same", op=hvd.Sum, process_set=pair)
        outer = hvd.allreduce_async(np.array([1]), name="same", op=hvd.Sum, process_set=everybody)
        assert hvd.synchronize(inner).tolist() == [2] and hvd.synchronize(outer).tolist() == [3]
    else:
        assert hvd.allreduce(np.array([1]), name="same", op=hvd.Sum).tolist() == [3]


@ranks(3, init=False)
def test_overlapping_sets_work_at_the_same_time_in_any_order():
    sets = [hvd.ProcessSet(members) for members in ([0, 1], [1, 2], [2, 0], [2], [1])]
    hvd.init(process_sets=sets)
    mine = [one for one in sets if one.included()]
    order = np.random.default_rng(hvd.rank())
    for turn in range(30):
        started = {}
        for index in order.permutation(len(mine)):
            one = mine[index]
            for kind in ("a", "b"):
                started[one.process_set_id, kind] = hvd.allreduce_async(
                    np.array([hvd.rank() + turn]), name=kind, op=hvd.Sum, process_set=one
                )
        for key in order.permutation(len(started)):
            (number, _), handle = list(started.items())[key]
            members = next(one.ranks for one in sets if one.process_set_id == number)
            assert hvd.synchronize(handle).tolist() == [sum(members) + turn * len(members)]


@ranks(3, init=False)
def test_a_set_is_never_delayed_by_another_sets_late_rank(tmp_path):
    late, prompt = hvd.ProcessSet([0, 2]), hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[late, prompt])
    free = tmp_path / "rank 2 may go on"
    if hvd.rank() == 2:
        wait_for(free)  # made when everything of the other set is over
    if hvd.rank() != 1:
        waiting = [
            hvd.allreduce_async(np.ones(100_000), name="late", op=hvd.Sum, process_set=late),
            hvd.allgather_async(np.ones(5), process_set=late),
            hvd.broadcast_async(np.full(3, hvd.rank()), 2, process_set=late),
        ]
    if hvd.rank() != 2:
        for _ in range(20):
            hvd.barrier(prompt)
            assert total(1, prompt) == 2
            assert hvd.allgather(np.array([hvd.rank()]), process_set=prompt).tolist() == [0, 1]
    if hvd.rank() == 0:
        assert not any(hvd.poll(handle) for handle in waiting)
        free.touch()
    if hvd.rank() != 1:
        reduced, gathered, received = map(hvd.synchronize, waiting)
        assert reduced[0] == 2 and gathered.size == 10 and received.tolist() == [2, 2, 2]


@ranks(2, 3, env=DYNAMIC)
def test_what_does_not_belong_to_a_set_is_refused_at_once_and_nothing_breaks():
    """That other operations say so: tests/torch/test_error_table.py."""
    one, me = hvd.add_process_set([0]), hvd.rank()
    if me != 0:
        with pytest.raises(ValueError, match=f"Rank {me} is not a member of the provided process set"):
            hvd.barrier(one)
    with pytest.raises(ValueError, match="does not exist, or has not been registered.*hvd.add_process_set"):
        hvd.barrier(hvd.ProcessSet([0, 1]))
    if me == 0:
        with pytest.raises(ValueError, match="root rank 1 is not a member of process set 1"):
            hvd.broadcast(np.ones(1), 1, process_set=one)
        assert one.rank() == 0 and total(5, one) == 5
    else:
        with pytest.raises(ValueError, match=f"Rank {me} is not a member"):
            one.rank()
    assert hvd.remove_process_set(one)
    with pytest.raises(ValueError, match="has not been registered"):
        hvd.allreduce(np.ones(1), process_set=one)
    still_works()


@ranks(3, env=DYNAMIC)
def test_ranks_that_disagree_about_a_set_all_raise_and_nothing_was_changed():
    me = hvd.rank()
    with pytest.raises(
        hvd.Mismatch, match=r"rank 0 passed ranks \[0, 1\], rank 2 passed ranks \[0, 2\].*same set"
    ):
        hvd.add_process_set([0, 2] if me == 2 else [0, 1])
    pair, other = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
    with pytest.raises(
        hvd.Mismatch, match=r"rank 0 passed process set 1, rank 1 passed process set 2.*same set"
    ):
        hvd.remove_process_set(other if me == 1 else pair)
    assert pair.process_set_id == 1 and other.process_set_id == 2
    for wrong, text in (
        ([0, 1], "exists already"),
        ([2, 1, 0], "exists already"),  # the global set's ranks
        ([1, 3], "outside the world of 3 ranks"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.add_process_set(wrong)
    for wrong, text in (([0.5], "ranks or of an mpi4py"), ("01", "ranks or of"), ([1, 1], "twice"), ([-1], "negative"), (3, "ranks or")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            hvd.add_process_set(wrong)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0, 1])) is False  # the same ranks, another object
    assert hvd.remove_process_set(pair) and hvd.remove_process_set(other)
    still_works()


@ranks(2, env=DYNAMIC)
def test_more_sets_than_there_is_room_for_is_an_error_and_the_runtime_goes_on():
    from horoclone import process_sets, runtime

    core = runtime.native()  # two ranks make three sets; the core does not refuse equal ones
    assert [core.add_process_set([turn % 2]) for turn in range(127)] == list(range(1, 128))
    with pytest.raises(hvd.Unsupported, match="more than 127 process sets; remove some first"):
        hvd.add_process_set([0])
    assert list(process_sets.registered()) == [0]
    still_works()


@ranks(3, init=False)
def test_horovods_private_names_for_process_sets():
    from horoclone.common.basics import HorovodBasics
    from horoclone.common.process_sets import _temp_process_set_object

    pair = hvd.ProcessSet([2, 0])
    hvd.init(process_sets=[pair])
    assert HorovodBasics()._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2]}
    with _temp_process_set_object(1) as found:
        assert found is pair and found.ranks == [0, 2]
        if found.included():
            assert total(1, found) == 2
    with pytest.raises(ValueError, match="id 7 does not exist"), _temp_process_set_object(7):
        pass
    assert str(pair) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
    assert hvd.global_process_set.ranks == [0, 1, 2] and hvd.global_process_set.rank() == hvd.rank()


@ranks(2, init=False)
def test_dynamic_sets_need_to_be_asked_for_and_the_variable_may_be_set_after_the_import():
    import os

    hvd.init()
    for call in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(hvd.ProcessSet([0]))):
        with pytest.raises(ValueError, match=r"HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init\(\)"):
            call()
    hvd.shutdown()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    assert hvd.add_process_set([0]).size() == 1
    hvd.shutdown()
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
    hvd.init(process_sets="dynamic")
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"  # as in Horovod
    assert hvd.add_process_set([0]).size() == 1


COMMUNICATORS = """
import os
from mpi4py import MPI
import numpy as np
import horoclone as hvd

world, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
total = lambda value, which: int(hvd.allreduce(np.array([value]), op=hvd.Sum, process_set=which)[0])

halves = world.Split(me % 2, me)  # {0, 2} and {1}: another communicator on each rank
backwards = world.Split(0 if me else 1, -me)  # {0} and {1, 2}, its members numbered from behind
some = world.Split(0 if me < 2 else MPI.UNDEFINED, me)  # {0, 1}, nothing on rank 2
for life in range(5):
    split, some_set = hvd.ProcessSet(halves), hvd.ProcessSet(some)
    hvd.init(world, process_sets=[split, some_set])
    assert split.ranks == ([1] if me == 1 else [0, 2]) and split.included() and split.mpi_comm is halves
    assert total(me, split) == sum(split.ranks) and split.rank() == halves.rank and split.size() == halves.size
    assert some_set.ranks == [0, 1] and some_set.included() is (me < 2)
    if me < 2:
        assert total(1, some_set) == 2
    from horoclone.common.basics import HorovodBasics
    known = HorovodBasics()._get_process_set_ids_and_ranks()
    assert sorted(known.values()) == [[0, 1], [0, 1, 2], [0, 2], [1]], known
    assert halves.allreduce(1) == halves.size  # MPI works beside it
    hvd.shutdown()

hvd.init(process_sets="dynamic")
for turn in range(20):
    split = hvd.add_process_set(hvd.ProcessSet(backwards))
    assert split.ranks == ([1, 2] if me else [0]) and total(1, split) == len(split.ranks)
    assert hvd.remove_process_set(split) is True and split.process_set_id is None
    assert len(HorovodBasics()._get_process_set_ids_and_ranks()) == 1
for wrong, kind in ((world.Dup(), ValueError), (world, ValueError), ([0] if me else halves, hvd.Mismatch)):
    try:
        hvd.add_process_set(wrong)
    except kind as error:
        assert "exists already" in str(error) or "rank 0 passed" in str(error), error
    else:
        raise AssertionError(wrong)
pieces = world.Split(me if me < 2 else MPI.UNDEFINED)
try:
    hvd.add_process_set(pieces)
except ValueError as error:
    assert "rank 2 passed MPI.COMM_NULL" in str(error), error
hvd.shutdown()

try:
    hvd.init([0, 1, 2], process_sets=[hvd.ProcessSet(halves)])
except NotImplementedError as error:
    assert "not a list of ranks" in str(error)

if me < 2:  # a world of two; a set made of the communicator of three is none of its
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init(some)
    assert (hvd.rank(), hvd.size()) == (some.rank, 2)
    try:
        hvd.add_process_set(world)
    except ValueError as error:
        assert "outside the world of init()" in str(error)
    one = some.Split(some.rank)
    mine = hvd.add_process_set(one)
    assert mine.ranks == [some.rank]
    hvd.shutdown()
os.write(1, b"fine\\n")
"""


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
def test_sets_made_of_communicators_that_differ_from_rank_to_rank(launch, request, name):
    mpi = request.getfixturevalue(name)
    done = launch([*mpi.command(3), sys.executable, "-c", COMMUNICATORS], env=mpi.env, timeout_s=100)
    assert done.stdout.split().count("fine") == 3, done.output


def copies_of(process_set: hvd.ProcessSet) -> dict[str, hvd.ProcessSet]:
    return {
        "copy": copy.copy(process_set),
        "deepcopy": copy.deepcopy({"inside": [process_set]})["inside"][0],
        "pickle": pickle.loads(pickle.dumps(process_set)),
        "cloudpickle": cloudpickle.loads(cloudpickle.dumps(lambda: process_set))(),
        "broadcast_object": hvd.broadcast_object(process_set),
    }


@ranks(3, env=DYNAMIC)
def test_a_copy_of_a_set_is_that_set():
    pair = hvd.add_process_set([0, 2])
    for original, among in ((hvd.global_process_set, 3), (pair, 2)):
        for how, copied in copies_of(original).items():
            assert copied == original and hash(copied) == hash(original) and copied in {original: 1}, how
            assert str(copied) == str(original) and copied.size() == among, how
            if original.included():
                assert copied.rank() == original.rank() and total(1, copied) == among, how
    assert pair != hvd.global_process_set and hvd.ProcessSet([0, 1, 2]) != hvd.global_process_set
    assert hvd.ProcessSet([2, 0]) == pair != hvd.ProcessSet([0, 1]) and pair != [0, 2]
    held = pickle.dumps(pair)
    assert hvd.remove_process_set(copy.deepcopy(pair)) and pair.process_set_id is None
    late = pickle.loads(held)
    assert late.size() is None and late == pair
    with pytest.raises(ValueError, match=r"ranks=\[0, 2\].*not been registered.*Registered besides.*: none"):
        hvd.allreduce(np.ones(1), process_set=late)
    again = hvd.add_process_set([0, 2])
    for known in (late, pair):
        assert known == again and known.size() == 2
        if known.included():
            assert total(1, known) == 2
    assert hvd.remove_process_set(again)
    still_works()


@ranks(2, env=DYNAMIC)
def test_a_set_of_an_earlier_life_is_the_one_with_its_ranks():
    first = hvd.add_process_set([1])
    held = pickle.dumps(first)
    hvd.shutdown()
    early = pickle.loads(held)
    assert early.process_set_id is None and early == first
    hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([1])])
    for known in (first, early, pickle.loads(held)):
        assert known.size() == 1 and known.included() is (hvd.rank() == 1)
        if known.included():
            assert total(7, known) == 7
    still_works()


@ranks(2, env=DYNAMIC)
def test_a_set_travels_to_a_spawned_process_which_does_not_know_it():
    pair = hvd.add_process_set([1])
    code = (
        "import pickle, sys, horoclone as hvd; s = pickle.load(sys.stdin.buffer); print(s); hvd.init()\n"
        "try: hvd.allreduce(__import__('numpy').ones(1), process_set=s)\n"
        "except ValueError as error: print(error)"
    )
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("HOROCLONE_", "HOROVOD_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(pair), capture_output=True, env=alone, timeout=60
    )
    out = done.stdout.decode()
    assert "ranks=[1]" in out and "has not been registered" in out, (out, done.stderr.decode())
