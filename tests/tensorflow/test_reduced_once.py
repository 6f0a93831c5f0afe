"""Gradients that a DistributedGradientTape has reduced, handed to a wrapped optimizer of Keras: reduced once. With Sum,
where twice would show."""

from __future__ import annotations

from typing import Any

from world import later, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


START, N = 0.0, 2


def weights() -> list[Any]:
    """A dense one, one that gets sparse gradients, one that is not used."""
    return [tf.Variable([START]), tf.Variable([[START], [START]]), tf.Variable([START])]


def optimizer(**options: Any) -> Any:
    import keras

    import horoclone.tensorflow.keras as hk

    return hk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, **options)


def gradients(variables: list[Any], x: Any, distributed: bool = True) -> list[Any]:
    """On rank r each is r + 1, times x."""
    with tf.GradientTape() as tape:
        both = variables[0] + tf.gather(variables[1], [1])
        loss = tf.reduce_sum(both) * x
    if distributed:
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    return tape.gradient(loss, variables)


def check(step: Any, variables: list[Any], times: float, factor: float = 1.0) -> None:
    """Each of three steps moves both variables by the sum over the ranks, 3, reduced so many times."""
    mine = tf.constant(hvd.rank() + 1.0)
    for number in range(1, 4):
        step(mine)
        expected = -number * 3.0 * times * factor
        assert variables[0].numpy().tolist() == [expected], (variables[0], expected)
        assert variables[1].numpy().tolist() == [[0.0], [expected]], (variables[1], expected)


@ranks(N)
def test_what_a_tape_gives_is_applied_as_it_is() -> None:
    for function in (False, True):
        for passes in (1, 2):
            variables, opt = weights(), optimizer(backward_passes_per_step=passes)
            opt.build(variables)

            def step(x: Any, variables: Any = variables, opt: Any = opt) -> None:
                opt.apply_gradients(
                    (g, v) for g, v in zip(gradients(variables, x), variables, strict=True) if g is not None
                )

            check(tf.function(step) if function else step, variables, times=1)


@ranks(N)
def test_gradients_that_no_tape_has_reduced_are_reduced() -> None:
    for function in (False, True):
        variables, opt = weights(), optimizer()
        opt.build(variables)

        def step(x: Any, variables: Any = variables, opt: Any = opt) -> None:
            opt.apply_gradients(
                zip(gradients(variables, x, distributed=False)[:2], variables[:2], strict=True)
            )

        check(tf.function(step) if function else step, variables, times=1)


@ranks(N)
def test_what_is_made_of_a_tapes_gradients_is_applied_as_it_is() -> None:
    """Clipped, scaled by a setting or a variable, made dense, summed over two tapes, from a condition."""

    def halved(found: list[Any]) -> list[Any]:
        return [
            g * 0.5 if not isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) * 0.5 for g in found
        ]

    def clipped(found: list[Any]) -> list[Any]:
        return [tf.clip_by_norm(tf.convert_to_tensor(g), 1.5) for g in found]

    def globally(found: list[Any]) -> list[Any]:
        return tf.clip_by_global_norm(found, 14**0.5 / 2)[0]  # of the dense 3 and of the sparse rows 1 and 2

    rate = tf.Variable(0.5)
    setting = tf.constant(0.5)

    def by_variable(found: list[Any]) -> list[Any]:
        return [tf.convert_to_tensor(g) * rate for g in found]

    def by_setting(found: list[Any]) -> list[Any]:
        return [tf.convert_to_tensor(g) * setting for g in found]

    def in_a_condition(found: list[Any]) -> list[Any]:
        dense = [tf.convert_to_tensor(g) for g in found]
        return tf.cond(rate > 0.0, lambda: [g * 0.5 for g in dense], lambda: dense)

    for change in (halved, clipped, globally, by_variable, by_setting, in_a_condition):
        for function in (False, True):
            variables, opt = weights()[:2], optimizer()
            opt.build(variables)

            def step(x: Any, variables: Any = variables, opt: Any = opt, change: Any = change) -> None:
                first = [tf.convert_to_tensor(g) for g in gradients(variables, x)]
                second = gradients(variables, x)
                two = (
                    [(a + b) / 2.0 for a, b in zip(first, second, strict=True)]
                    if change is halved
                    else second
                )
                opt.apply_gradients(zip(change(two), variables, strict=True))

            mine = tf.constant(hvd.rank() + 1.0)
            (tf.function(step) if function else step)(mine)
            assert abs(variables[0].numpy()[0] + 1.5) < 1e-5, (change.__name__, function, variables[0])
            assert abs(variables[1].numpy()[1][0] + 1.5) < 1e-5, (change.__name__, function, variables[1])


@ranks(N)
def test_a_function_may_give_or_take_the_gradients() -> None:
    """A compiled tape and an update outside; an update that captures; a function within a function."""
    mine = tf.constant(hvd.rank() + 1.0)
    compiled = None
    variables, opt = weights()[:2], optimizer()
    opt.build(variables)
    compiled = tf.function(lambda x: gradients(variables, x))

    def outside(x: Any) -> None:
        opt.apply_gradients(zip(compiled(x), variables, strict=True))

    check(outside, variables, times=1)

    variables, opt = weights()[:2], optimizer()
    opt.build(variables)
    inner = tf.function(lambda x: gradients(variables, x))

    @tf.function
    def nested(x: Any) -> None:
        opt.apply_gradients(zip(inner(x), variables, strict=True))

    check(nested, variables, times=1)

    variables, opt = weights()[:2], optimizer()
    opt.build(variables)
    given = gradients(variables, mine)

    @tf.function
    def capturing() -> None:
        opt.apply_gradients(zip(given, variables, strict=True))

    capturing()
    assert variables[0].numpy().tolist() == [-3.0] and variables[1].numpy().tolist() == [[0.0], [-3.0]]


@ranks(N)
def test_what_data_flows_into_is_reduced() -> None:
    """Gradients of a plain tape behind a distributed one, as in learning to learn, and those of another origin later."""
    for function in (False, True):
        variables, opt = weights()[:2], optimizer()
        opt.build(variables)

        def step(x: Any, variables: Any = variables, opt: Any = opt) -> None:
            inner = gradients(variables, x)[0]
            with tf.GradientTape() as tape:
                moved = variables[0] - 0.0 * inner
                loss = tf.reduce_sum(moved + tf.gather(variables[1], [1])) * x
            outer = tape.gradient(loss, variables)
            if tf.executing_eagerly():  # what the variables remember ends with an update
                none = [tf.zeros_like(v) for v in variables]
                opt.apply_gradients(zip(none, variables, strict=True))
            opt.apply_gradients(zip(outer, variables, strict=True))

        check(tf.function(step) if function else step, variables, times=1)


@ranks(N)
def test_random_numbers_of_a_rank_do_not_make_ranks_differ() -> None:
    """Noise is added to what a tape has averaged."""
    import keras

    import horoclone.tensorflow.keras as hk

    for function in (False, True):
        variable, opt = tf.Variable([START]), hk.DistributedOptimizer(keras.optimizers.SGD(1.0))
        opt.build([variable])

        def step(variable: Any = variable, opt: Any = opt) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable) * (hvd.rank() + 1.0)
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, variable)
            opt.apply_gradients([(gradient + tf.random.normal([1], seed=hvd.rank()), variable)])

        (tf.function(step) if function else step)()
        first, second = hvd.allgather(variable).numpy().tolist()
        assert first == second != -1.5
