"""Those of the twenty traps of Horovod's elastic training (docs/from_horovod.md) that no other test is about."""

from __future__ import annotations

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
from horoclone.runtime import topology

HERE = Path(__file__).parent
RUN = [sys.executable, "-m", "horoclone.launch"]


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
    state = ObjectState(broadcast_object, topology.rank, epoch=0)
    state.commit()
    if topology.rank() == 0:
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
    monkeypatch.setattr(topology, "size", lambda: size)
    taken = []
    for rank in range(size):
        monkeypatch.setattr(topology, "rank", lambda rank=rank: rank)
        sampler = ElasticSampler(range(10 + left), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": 10})
        taken.append(list(sampler))
    assert len({len(one) for one in taken}) == 1
    assert {index for one in taken for index in one} == set(range(10, 10 + left))
