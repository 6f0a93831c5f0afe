"""hvd.metric_mean and metric_sum with TensorFlow's tensors; the rest is in tests/torch/test_evaluation.py."""

from __future__ import annotations

from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


@ranks(2)
def test_tensors_and_variables_of_tensorflow_are_counted() -> None:
    mine = tf.gather(tf.range(11, dtype=tf.float32), hvd.EvaluationSampler(range(11))[:])
    found = hvd.metric_mean({"loss": tf.reduce_mean(mine), "same": tf.Variable(2.0)}, count=len(mine))
    assert found == {"loss": 5.0, "same": 2.0}
    assert hvd.metric_sum(tf.fill([3], hvd.rank() + 1)).tolist() == [3, 3, 3]
    assert hvd.metric_sum(tf.constant(0.5, tf.bfloat16)) == 1.0
