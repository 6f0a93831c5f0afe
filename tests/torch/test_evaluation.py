"""Evaluation counts each sample once: hvd.EvaluationSampler, metric_sum and metric_mean against one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world import ranks

import horoclone as plain
import horoclone.torch as hvd


@ranks(1, 3)
def test_each_sample_is_counted_once_also_where_there_are_fewer_than_ranks() -> None:
    for length in (0, 1, 2, 3, 10, 103):
        values = torch.arange(length, dtype=torch.float64).sqrt()
        sampler = hvd.EvaluationSampler(values)
        loader = torch.utils.data.DataLoader(values, batch_size=4, sampler=sampler)
        mine = torch.cat([*loader, torch.empty(0, dtype=torch.float64)])
        assert len(mine) == len(sampler) == len(sampler[:])
        assert torch.equal(hvd.allgather(mine), values), "in the order of the data set"
        assert hvd.metric_sum(len(mine)) == length
        if length:
            mean = mine.mean()  # NaN where there are no samples: it is not looked at
            assert hvd.metric_mean(mean, len(mine)) == pytest.approx(values.mean().item(), rel=1e-15)


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_numbers_tensors_arrays_and_dictionaries_of_them() -> None:
    me = hvd.rank() + 1
    assert hvd.metric_sum(2**60 * me) == 6 * 2**60, "integers stay integers"
    assert hvd.metric_sum(torch.tensor(0.1)) == pytest.approx(0.3)
    assert hvd.metric_sum(torch.tensor([me, 2 * me], dtype=torch.bfloat16)).tolist() == [6.0, 12.0]
    confusion = hvd.metric_sum(np.full((2, 2), me, np.int32))
    assert confusion.dtype == np.int64 and confusion.tolist() == [[6, 6], [6, 6]]
    found = hvd.metric_mean(
        {"loss": torch.tensor(float(me), requires_grad=True), "right": np.array([me, 0])}, count=me
    )
    assert found["loss"] == pytest.approx(14 / 6) and found["right"].tolist() == pytest.approx([14 / 6, 0])
    large = np.array([2**61, 3])
    assert hvd.metric_mean({"ns": {"at": large}}, count=4)["ns"]["at"].tolist() == [2.0**61, 3.0]
    with pytest.raises(OverflowError, match="int64; give float64"):
        hvd.metric_sum(2 * large)
    assert hvd.metric_mean(None if me == 2 else 3.0, 0 if me == 2 else 1) == 3.0  # no samples, no value
    assert plain.metric_mean(1.0, 0.5 * me) == 1.0  # weights need not be whole
    evens = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        assert hvd.metric_sum(me, process_set=evens) == 4
        assert len(hvd.EvaluationSampler(range(5), evens)) == (3 if hvd.rank() == 0 else 2)
    else:
        with pytest.raises(ValueError, match="not a member"):
            len(hvd.EvaluationSampler(range(5), evens))
    hvd.remove_process_set(evens)


@ranks(3)
def test_bad_input_of_one_rank_is_the_same_error_on_all_and_they_go_on() -> None:
    last = hvd.rank() == 2
    for count, text in (
        (-1, "the count of rank 2 is -1"),
        (float("nan"), "rank 2 is nan"),
        (float("inf"), "is inf"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.metric_mean(1.0, count if last else 1)
    with pytest.raises(ValueError, match="the counts of all ranks are 0"):
        hvd.metric_mean(1.0, 0)
    with pytest.raises(ValueError, match="different names or shapes.*'acc'.*'loss'"):
        hvd.metric_mean({"loss": 1.0} if last else {"acc": 1.0}, 1)
    with pytest.raises(ValueError, match=r"different names or shapes: \{0: \(3,\)"):
        hvd.metric_sum(np.zeros(2 if last else 3))
    with pytest.raises(ValueError, match="rank 2 gave a value that is not a number"):
        hvd.metric_sum("much" if last else 1)
    with pytest.raises(ValueError, match="rank 2 gave a value that is not a number"):
        hvd.metric_sum(1j if last else 1)
    assert hvd.metric_mean(hvd.rank(), hvd.rank()) == pytest.approx(5 / 3)
    assert np.isnan(hvd.metric_mean(float("nan") if last else 1.0, 1)), "a NaN that was counted shows"
