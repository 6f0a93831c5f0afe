"""hvd.metric_mean and metric_sum with arrays of JAX; the rest is in tests/torch/test_evaluation.py."""

from __future__ import annotations

import pytest
from world import later, ranks

jnp = later("jax.numpy")
hvd = later("horoclone.jax")


@ranks(2)
def test_arrays_of_jax_are_counted() -> None:
    mine = jnp.arange(11.0)[hvd.EvaluationSampler(range(11))[:]]
    found = hvd.metric_mean({"loss": mine.mean(), "half": mine.astype(jnp.bfloat16).mean()}, count=len(mine))
    assert found == {"loss": 5.0, "half": 5.0}
    assert hvd.metric_sum(jnp.full(3, hvd.rank() + 1)).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="rank 0 gave a value that is not a number"):
        hvd.metric_sum(jnp.complex64(1j))
