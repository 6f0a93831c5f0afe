"""Memory of eager operations under ever new names and with ever new factors: TensorFlow keeps a kernel for each value
of an attribute."""

from world import ranks


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def growth(calls: int, first: int = 0) -> float:
    """Bytes for each call, under names, with sizes and with factors that were never used before."""
    import tensorflow as tf

    import horoclone.tensorflow as hvd

    before = resident()
    for number in range(first, first + calls):
        tensor = tf.fill([1 + number % 97], 1.0)
        assert float(hvd.allreduce(tensor, name=f"metric_{number}", op=hvd.Sum)[0]) == hvd.size()
        factor = number + 3.0
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            scaled = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=factor, postscale_factor=factor)
        assert float(scaled[0]) == hvd.size() * factor**2
        assert float(tape.gradient(scaled, tensor)[0]) == hvd.size() * factor**2
        hvd.broadcast(tensor, 0, name=f"state_{number}")
        hvd.allgather(tensor, name=f"row_{number}")
    return (resident() - before) / (5 * calls)


@ranks(2, limit_s=240, env={"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""})
def test_new_names_and_factors_cost_no_memory() -> None:
    """It was 31 KB for each. What is left is the core's, which remembers 8,192 names at most."""
    growth(100)
    assert growth(150, 100) < 6000
