"""The exception classes, the numbers of operations, and what importing the package costs."""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import sys
import warnings

import pytest

from horoclone import errors, ops, tensor_names
from horoclone.runtime import exit_hooks


def test_every_error_of_the_runtime_is_a_horovod_internal_error():
    for name in ("PeerLost", "Mismatch", "Timeout", "Aborted", "Unsupported", "NotInitialized"):
        assert issubclass(getattr(errors, name), errors.HorovodInternalError), name
    assert issubclass(errors.HorovodInternalError, RuntimeError)


def test_peer_lost_names_the_rank():
    assert errors.PeerLost("rank 3 died", 3).rank == 3
    assert errors.PeerLost("somebody died").rank == -1


def test_the_error_that_ends_a_process_names_the_tensors_of_compiled_operations(monkeypatch):
    """By place, else the first few; not where two programs have other tensors under one name."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(str(error)))
    monkeypatch.setattr(exit_hooks, "_hooks_installed", False)
    monkeypatch.setattr(exit_hooks, "_tell_failure", lambda *_: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(tensor_names, "_known", {})
    exit_hooks.install_hooks(lambda: None, lambda _: None, lambda: None)
    names = ["w", "b", "out/w", "out/b"]
    for operation, tensors in {"step": names, "tape/op": names, "both": names, "alone": [""]}.items():
        tensor_names.remember(operation, tensors)
    tensor_names.remember("both", names[1:])
    for text, expected in {
        "'f/tape/op': rank 1 announced tensor 1 as a, rank 0 announced tensor 1 as b":
        "'f/tape/op': rank 1 announced tensor 1 (b) as a, rank 0 announced tensor 1 (b) as b",
        "rank 1 has died in 'step' (3 s)": "rank 1 has died in 'step' (w, b, out/w and 1 more) (3 s)",
        "'both': tensor 1 as a, 'alone'": "'both': tensor 1 as a, 'alone'",
        "no value: 'x' failed\n\nAt:\n  /a b/work.py(214): fail\n  t.py(3): <module>\n": "no value: 'x' failed",
    }.items():  # fmt: skip
        for _ in range(2):  # what is complete stays as it is
            sys.excepthook(RuntimeError, RuntimeError(text), None)
            assert seen.pop() == expected
            text = expected


def test_an_exception_that_somebody_has_caught_ends_no_process(monkeypatch):
    """Shells and test runners leave theirs where the interpreter has its last one."""
    try:
        raise ValueError("caught")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        assert error.__traceback__ is not None and exit_hooks._uncaught() is None


def test_an_error_that_has_no_text_is_called_by_its_class():
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    assert exit_hooks.failure_line(1, Mute, Mute()) == "rank 1 raised Mute"


class OfAUser(Exception):
    """Made from other arguments than its text; the names of tensors cannot be put into it."""

    def __init__(self, operation: str, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class ReadOnly(Exception):
    _message = property(lambda self: self.args[0])


@pytest.mark.parametrize("quoted", ["'step'", "a.yaml"])
@pytest.mark.parametrize("make", [lambda quoted: OfAUser(quoted, 7), ReadOnly])
def test_an_error_of_a_class_of_the_user_stays_what_it_is(monkeypatch, make, quoted):
    """The hook that ends the process called its __init__ again, and told the other ranks of a TypeError."""
    monkeypatch.setattr(tensor_names, "_known", {"step": ("w",)})
    error = make(quoted)
    before = str(error)
    tensor_names.complete(error)
    assert str(error) == before


def test_hosts_updated_interrupt_is_no_internal_error():
    interrupt = errors.HostsUpdatedInterrupt(skip_sync=True)
    assert interrupt.skip_sync and not errors.HostsUpdatedInterrupt().skip_sync
    assert isinstance(interrupt, RuntimeError) and not isinstance(interrupt, errors.HorovodInternalError)


def test_version_mismatch_tells_both_versions():
    error = errors.HorovodVersionMismatchError("torch", "2.2", "2.1")
    assert (error.name, error.version, error.installed_version) == ("torch", "2.2", "2.1")
    assert isinstance(error, ImportError)
    assert "torch 2.1 is installed" in str(error) and "Install torch 2.2" in str(error)


def test_reductions_have_horovods_numbers():
    assert ops.REDUCE_NAMES[:6] == ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    assert [getattr(ops, name) for name in ops.REDUCE_NAMES] == list(range(len(ops.REDUCE_NAMES)))


@pytest.mark.parametrize(
    ("average", "op", "expected"),
    [
        (None, None, ops.Average),
        (None, ops.Sum, ops.Sum),
        (None, ops.Product, ops.Product),
        (None, 0, ops.Average),
    ],
)
def test_op_decides_and_average_is_the_default(average, op, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.resolve_reduce(average, op) == expected


@pytest.mark.parametrize(("average", "expected"), [(True, ops.Average), (False, ops.Sum)])
def test_average_argument_still_works_with_a_warning(average, expected):
    with pytest.warns(DeprecationWarning, match="op=hvd"):
        assert ops.resolve_reduce(average, None) == expected


@pytest.mark.parametrize(
    ("average", "op"),
    [(True, ops.Sum), (False, ops.Average), (None, len(ops.REDUCE_NAMES)), (None, -1), (None, "Sum")],
)
def test_contradicting_or_unknown_reductions_are_refused(average, op):
    with pytest.raises(ValueError, match="op"):
        ops.resolve_reduce(average, op)


def test_every_public_name_can_be_found():
    import horoclone

    for name in horoclone.__all__:
        assert getattr(horoclone, name) is not None, name
    assert set(horoclone.__all__) <= set(dir(horoclone))
    with pytest.raises(AttributeError, match="no_such_name"):
        horoclone.no_such_name  # noqa: B018


def test_every_operation_on_arrays_has_its_own_name_and_text_and_can_be_pickled():
    import horoclone
    from horoclone import arrays

    for name in arrays.__all__:
        function = getattr(horoclone, name)
        assert function is getattr(arrays, name) and function.__name__ == name and function.__doc__, name
        again = pickle.loads(pickle.dumps(function))
        assert again.__name__ == name and inspect.signature(again) == inspect.signature(function), name
    assert {"reduce_", "reduce_async_", "grouped_allreduce_", "grouped_allreduce_async_"} <= {*arrays.__all__}


def test_process_sets_check_their_ranks():
    from horoclone.process_sets import ProcessSet

    assert ProcessSet([3, 1]).ranks == [1, 3]
    assert str(ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    for wrong in ([0, 0], [-1], 5):
        with pytest.raises(ValueError, match="process set"):
            ProcessSet(wrong)
