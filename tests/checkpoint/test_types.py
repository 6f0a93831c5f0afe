"""What is loaded equals what was saved, with its type, or save() refuses by name."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from horoclone.checkpoint import load
from horoclone.checkpoint.saving import save_alone

A = np.arange(6.0).reshape(2, 3)


class Pair(NamedTuple):
    first: Any
    second: Any


class Other(NamedTuple):
    second: Any
    first: Any


class Number(int):
    pass


class Color(enum.IntEnum):
    RED = 1


class Named(dict):
    pass


class Items(list):
    pass


@dataclasses.dataclass
class Data:
    x: int


class Sub(np.ndarray):
    pass


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    return bool(a == b)


KEPT: dict[str, Any] = {
    "keys": {1: A, "1": A + 1, -1: A + 2, "": 0, "a.b": 1, "a": {"b": 2}}, "ordered": collections.OrderedDict(b=A, a=1),
    "surrogates": {"\ud800": A, "x": "\ud800"}, "nul": {"a\0b": A, "\n": A + 1}, "normal": {"\u00e9": A, "e\u0301": A + 1},
    "case": {"W": A, "w": A + 1}, "paths": {"../../x": A, "/etc": A, "..": A + 1}, "header": {"__metadata__": A},
    "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1], "large": [2**63, -(2**64), 10**3999],
    "empty": {"a": {}, "b": [], "c": (), "d": np.zeros((0, 3)), "e": np.zeros((3, 0), np.int8), "f": ""},
    "scalars": [np.float32(2), np.bool_(True), np.int8(-1), np.array(3.5), np.complex64(1 + 2j), np.float64(0.1)],
    "strides": [A.T, A[::-1], np.broadcast_to(np.arange(3), (4, 3)), np.asfortranarray(A), A[:, 1]],
    "endian": [A.astype(">f8"), np.arange(3, dtype=">i2"), np.array(1.5, ">f4"), np.zeros((0, 2), ">c8"), A.astype("<f8")],
    "unaligned": np.frombuffer(b"\0" * 33, np.uint8)[1:].view(np.float64), "read only": np.frombuffer(b"abc", np.uint8),
    "nan with bits": np.array([0x7FC00001, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32),
    "random": {"np": list(np.random.RandomState(1).get_state()), "py": (3, (1, 2, 3), None)},
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(tmp_path: Path, name: str) -> None:
    save_alone(tmp_path, KEPT[name], 1)
    assert equal(load(tmp_path), KEPT[name])
    assert equal(load(tmp_path, like=KEPT[name]), KEPT[name])


REFUSED: dict[str, Any] = {
    "masked": np.ma.masked_array([1, 2], [0, 1]), "masked, nothing hidden": np.ma.masked_array([1, 2]),
    "masked scalar": np.ma.masked, "matrix": np.matrix([[1, 2]]), "recarray": np.recarray(2, [("x", "i4")]),
    "subclass": A.view(Sub), "memmap": None, "structured": np.zeros(2, [("x", "i4")]), "void": np.void(b"ab"),
    "objects": np.array([1, "x", None], object), "text": np.array(["x"]), "bytes array": np.array([b"x"]),
    "time": np.array(["2020-01-01"], "M8[D]"), "time difference": np.timedelta64(1, "s"), "longdouble": np.longdouble(1),
    "complex128": A * 1j, "text scalar": np.str_("x"), "int subclass": Number(3), "enum": Color.RED, "set": {1, 2},
    "frozenset": frozenset([1]), "bytes": b"x", "bytearray": bytearray(b"x"), "memoryview": memoryview(b"x"),
    "complex": 1j, "range": range(3), "function": print, "dataclass": Data(1), "dict subclass": Named(a=1),
    "defaultdict": collections.defaultdict(list), "counter": collections.Counter("ab"), "chain": collections.ChainMap({}),
    "deque": collections.deque([1]), "list subclass": Items([1]), "too long": 10**5000, "type": int, "ellipsis": ...,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_back_as_something_else_is_refused_by_name(tmp_path: Path, name: str) -> None:
    value = REFUSED[name]
    if name == "memmap":
        value = np.memmap(tmp_path / "file", np.float32, "w+", shape=3)
    for state in ({"x": value}, {"x": [value]}, {"x": {"y": (1, value)}}, {"x": Pair(1, value)}):
        with pytest.raises((TypeError, ValueError), match=r"state\['x'\]"):
            save_alone(tmp_path / "saves", state, 1)


@pytest.mark.parametrize(
    "key", [True, None, 1.5, (1, 2), b"x", np.int64(1), Color.RED, np.str_("x")], ids=repr
)
def test_keys_are_strings_or_integers(tmp_path: Path, key: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['x'\] has the key"):
        save_alone(tmp_path, {"x": {key: 1}}, 1)


def test_a_named_tuple_is_one_again_where_like_is(tmp_path: Path) -> None:
    save_alone(tmp_path, {"x": Pair(A, 2)}, 1)
    assert equal(load(tmp_path), {"x": (A, 2)})
    assert equal(load(tmp_path, like={"x": Pair(A, 0)}), {"x": Pair(A, 2)})
    assert equal(load(tmp_path, like={"x": (A, 0)}), {"x": (A, 2)})
    with pytest.raises(ValueError, match=r"state\['x'\] has the fields \('first', 'second'\) in the save"):
        load(tmp_path, like={"x": Other(A, 0)})


def test_tensors_come_back_as_what_they_were(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import horoclone.checkpoint.torch  # noqa: F401

    complexes = torch.tensor([1 + 2j, 3j])
    state = {
        "plain": torch.arange(3.0), "with": torch.ones(3, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False), "buffer": torch.nn.Buffer(torch.ones(2)),
        "result": torch.ones(2, requires_grad=True) * 2, "conj": complexes.conj(), "negative": complexes.conj().imag,
        "view": torch.arange(10.0)[::2], "turned": torch.arange(6).view(2, 3).t(), "expanded": torch.zeros(1).expand(5),
        "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "integers": torch.nn.Parameter(torch.arange(2), False),
        "last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last), "generator": torch.Generator().get_state(),
        "half": torch.ones(3, dtype=torch.float16), "bool": torch.tensor([True, False]),
        "eight": torch.ones(5).to(torch.float8_e5m2),
    }  # fmt: skip
    save_alone(tmp_path, state, 1)
    for found in (load(tmp_path), load(tmp_path, like=state)):
        for name, value in state.items():
            one = found[name]
            assert type(one) is (
                torch.nn.Parameter if "Parameter" in type(value).__name__ else torch.Tensor
            ), name
            assert one.dtype == value.dtype and one.requires_grad == value.requires_grad and one.is_leaf, name
            wide = torch.complex64 if value.dtype == torch.float8_e5m2 else value.dtype
            assert torch.equal(one.detach().to(wide), value.detach().resolve_conj().resolve_neg().to(wide)), (
                name
            )
    as_arrays = load(tmp_path, like={**state, "half": np.ones(3, np.float16)})
    assert isinstance(as_arrays["half"], np.ndarray)


def test_tensors_that_would_lose_something_are_refused_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import horoclone.checkpoint.torch  # noqa: F401

    class Mine(torch.Tensor):
        pass

    refused = {
        "class": torch.ones(2).as_subclass(Mine), "lazy": torch.nn.UninitializedParameter(),
        "sparse": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr(), "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "complex": torch.zeros(2, dtype=torch.complex128), "eight": torch.ones(2).to(torch.float8_e4m3fnuz),
        "functional": torch.nn.ParameterList([torch.ones(2)]), "size": torch.Size([2, 3]), "dtype": torch.float32,
        "device": torch.device("cpu"), "generator": torch.Generator(),
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(TypeError, match=rf"state\['{name}'\]"):
            save_alone(tmp_path, {name: value}, 1)
