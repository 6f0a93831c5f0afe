"""Objects in an elastic state that have a state of their own, or refer to one that has: they stay the objects they are."""

from __future__ import annotations

import functools
import pickle
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from horoclone.elastic.attributes import Attributes
from horoclone.elastic.state import ObjectState
from horoclone.owned import Owned


class Engine:
    """As an optimizer: it says itself what is inside of it."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state["rate"]


class Warmup:
    """As a schedule that somebody has written for himself: it refers to the engine, and has nothing else."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps, self.log = engine, 0, [0.0]

    def step(self) -> None:
        self.steps += 1
        self.engine.rate *= 2
        self.log.append(self.engine.rate)


@dataclass
class Parts:
    engine: Engine
    done: list[int] = field(default_factory=list)


def a_state(**attributes: Any) -> ObjectState:
    return ObjectState(lambda obj: pickle.loads(pickle.dumps(obj)), lambda: 0, **attributes)


FORMS = {
    "a list": lambda warmup: [1, warmup],
    "a dict": lambda warmup: {"schedules": {"a": warmup}},
    "a tuple": lambda warmup: (warmup, [2]),
    "a set": lambda warmup: {warmup},
    "a dataclass": lambda warmup: Parts(warmup),
    "a method": lambda warmup: warmup.step,
    "a partial": lambda warmup: functools.partial(Warmup.step, warmup),
    "itself": lambda warmup: warmup,
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_holds_a_schedule_it_goes_on_with_the_same_engine(form: str) -> None:
    engine = Engine(1.0)
    warmup = Warmup(engine)
    state = a_state(value=FORMS[form](warmup), engine=engine, epoch=0)
    for again in (lambda: None, state.sync):
        again()
        warmup.step()
        state.epoch += 1
        state.commit()
        kept = engine.rate, warmup.steps, list(warmup.log), state.epoch
        warmup.step()
        state.restore()
        assert state.engine is engine and warmup.engine is engine
        assert (engine.rate, warmup.steps, warmup.log, state.epoch) == kept
    assert (engine.rate, warmup.steps) == (4.0, 2)


def test_the_same_where_the_schedule_comes_before_its_engine_and_twice() -> None:
    engine = Engine(1.0)
    warmup = Warmup(engine)
    state = a_state(warmup=warmup, again=warmup, engines={"main": engine})
    warmup.step()
    state.commit()
    warmup.step()
    state.restore()
    assert state.warmup is state.again is warmup and state.engines["main"] is warmup.engine is engine
    assert (engine.rate, warmup.steps) == (2.0, 1)
    state.sync()
    assert state.warmup is state.again is warmup and (engine.rate, warmup.steps) == (2.0, 1)


def test_the_commit_before_belongs_to_the_objects_of_that_time() -> None:
    first, second = Engine(1.0), Engine(10.0)
    state = a_state(engines=[first, second])
    state.commit()
    state.engines.pop(0)
    second.rate = 20.0
    state.commit()
    first.rate = second.rate = 0.0
    state.restore()
    assert state.engines == [second] and second.rate == 20.0
    state._step_back(1)
    assert state.engines == [first, second] and (first.rate, second.rate) == (1.0, 10.0)


def test_another_rank_fills_its_own_objects_and_says_when_it_has_none() -> None:
    engine, mine = Engine(4.0), Engine(1.0)
    theirs = Attributes({"all": [Warmup(engine)], "engine": engine}, ())
    values, states = pickle.loads(pickle.dumps(theirs.copied(["all", "engine"])))
    warmup = Warmup(mine)
    found, writes = Attributes({"all": [warmup], "engine": mine}, ()).resolved(values, states)
    for write, value, inside in writes:
        write(value, inside)
    assert found == {"all": [warmup], "engine": mine} and warmup.engine is mine and mine.rate == 4.0
    with pytest.raises(
        ValueError, match=r"has a Engine at all\[0\]\.engine, and in this process there is none"
    ):
        Attributes({"all": [], "engine": mine}, ()).resolved(values, states)


def test_two_objects_of_a_set_cannot_be_told_apart() -> None:
    with pytest.raises(
        TypeError, match=r"both\{Engine\} stands for two objects that have a state: keep them"
    ):
        a_state(both={Engine(1.0), Engine(2.0)})


def test_what_cannot_be_copied_is_named_and_its_engine_is_kept() -> None:
    warmup = Warmup(Engine(1.0))
    warmup.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="'warmup' of an elastic state cannot be copied"):
        state = a_state(warmup=warmup, engine=warmup.engine, epoch=0)
    state.sync()
    warmup.engine.rate, state.epoch = 5.0, 1
    state.restore()
    assert state.warmup is warmup and state.engine is warmup.engine and state.epoch == 0
    assert warmup.engine.rate == 1.0  # it was saved under its own name


def test_by_reference_nothing_inside_goes_back_but_ranks_become_alike() -> None:
    warmup = Warmup(Engine(1.0))
    state = a_state(warmup=warmup)
    state.by_reference("warmup")
    warmup.step()
    state.restore()
    assert state.warmup is warmup and warmup.steps == 1
    sent: list[Any] = []
    state._bcast_object = lambda obj: sent.append(dict(obj)) or obj
    state.sync()
    assert state.warmup is warmup and sent[0]["warmup"]["steps"] == 1


def test_an_owned_schedule_stays_the_same() -> None:
    engine = Engine(1.0)
    warmup = Warmup(engine)
    state = a_state(engine=engine, mine=Owned(warmup))
    warmup.step()
    state.commit()
    warmup.step()
    state.restore()
    assert state.mine.value is warmup and warmup.engine is engine and (engine.rate, warmup.steps) == (2.0, 1)


class Plain:
    """As an early stopping that the training function refers to."""

    def __init__(self) -> None:
        self.history: list[Any] = [1]
        self.me = self


def test_an_object_of_a_class_of_your_own_stays_the_same_and_is_filled() -> None:
    plain = Plain()
    state = a_state(plain=plain, all={"of": [plain]})
    plain.history.append(2)
    plain.new = True  # type: ignore[attr-defined]
    state.restore()
    assert state.plain is plain is plain.me is state.all["of"][0]
    assert plain.history == [1] and not hasattr(plain, "new")


def test_objects_that_another_rank_has_not_made_are_made() -> None:
    engine, mine = Engine(4.0), Engine(1.0)
    warmup = Warmup(engine)
    warmup.step()
    theirs = Attributes({"engine": engine, "seen": [Plain(), Plain()], "warmup": warmup}, ())
    values, states = pickle.loads(pickle.dumps(theirs.copied(["engine", "seen", "warmup"])))
    found, writes = Attributes({"engine": mine, "seen": [], "warmup": None}, ()).resolved(values, states)
    for write, value, inside in writes:
        write(value, inside)
    assert found["engine"] is mine is found["warmup"].engine and mine.rate == 8.0
    assert found["warmup"].steps == 1 and len({id(one.me) for one in found["seen"]}) == 2
    assert [one.history for one in found["seen"]] == [[1], [1]]


def test_what_is_more_than_its_attributes_is_copied_as_ever() -> None:
    class Generator(random.Random):
        pass

    class Pickles:
        def __init__(self) -> None:
            self.value, self.lock = [1], threading.Lock()

        def __getstate__(self) -> Any:
            return {"value": self.value}

        def __setstate__(self, state: Any) -> None:
            self.value, self.lock = state["value"], threading.Lock()

    generator, pickles = Generator(5), Pickles()
    state = a_state(generator=generator, pickles=pickles, plain={frozenset({1}): {Plain(), Plain()}})
    first = generator.random()
    pickles.value.append(2)
    state.restore()
    assert state.generator.random() == first and state.pickles.value == [1]
