"""What a table or a key takes: nothing becomes another number or another name on its way to the servers or to a disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ps_cluster import Cluster

from horoclone import errors
from horoclone.ps import SGD, Adam, Servers, Sum, Table, files
from horoclone.ps import torch as ps


@pytest.fixture(scope="module")
def servers(cluster: Cluster) -> Iterator[Servers]:
    made = cluster.worker()
    yield made
    made.close()


ONE = np.ones((1, 4))
IDS = [
    ([1.7], TypeError, r"ids has 1\.7 \(a float\)"),
    ([1.0], TypeError, r"ids has 1\.0"),
    (np.array([1.7]), TypeError, "ids of float64, the first is .*1.7"),
    (np.array([np.nan]), TypeError, "ids of float64"),
    (np.array([True]), TypeError, "ids of bool"),
    ([True], TypeError, r"ids has True \(a bool\)"),
    (["3"], TypeError, r"ids has '3' \(a str\)"),
    ("3", TypeError, "ids has '3'"),
    (np.array([1], object), TypeError, "ids of object"),
    (np.array([1 + 0j]), TypeError, "ids of complex128"),
    (np.ma.masked_array([1], [True]), TypeError, "ids is a masked array"),
    (3, TypeError, r"ids=3 \(an int\)"),
    (np.array([2**63 + 5], np.uint64), ValueError, "ids has 9223372036854775813"),
    ([2**63], ValueError, "ids has 9223372036854775808"),
    ([2**64], ValueError, "ids has 18446744073709551616"),
    ([-(2**63) - 1], ValueError, "ids has -9223372036854775809"),
    ([[1, 2]], ValueError, r"ids of shape \(1, 2\)"),
    (np.array(1), ValueError, r"ids of shape \(\)"),
]


@pytest.mark.parametrize(("ids", "kind", "text"), IDS, ids=[str(one[0]) for one in IDS])
def test_an_id_that_would_become_another_is_refused(
    servers: Servers, ids: Any, kind: type[Exception], text: str
) -> None:
    table = Table(servers, "ids", 4, Sum())
    for call in (table.pull, lambda ids: table.push(ids, ONE), lambda ids: table.assign(ids, ONE)):
        with pytest.raises(kind, match=f"table 'ids': {text}"):
            call(ids)


def test_every_id_of_64_bits_is_its_own_row(servers: Servers) -> None:
    table = Table(servers, "extreme", 1, Sum())
    ids = [2**63 - 1, -(2**63), 0, -1]
    table.push(ids, [[1], [2], [3], [4]])
    assert table.pull(ids)[:, 0].tolist() == [1, 2, 3, 4]
    for dtype in (np.int8, np.uint8, np.uint64, ">i8"):
        assert table.pull(np.array([0], dtype))[0, 0] == 3
    assert table.pull([]).shape == (0, 1) and table.pull(np.array([])).shape == (0, 1)
    table.push([], np.ones((0, 1)))


ROWS = [
    (ONE * 1j, TypeError, "of complex128"),
    (ONE > 0, TypeError, "of bool"),
    ([["1"] * 4], TypeError, "of <U1"),
    (np.ones((1, 4), object), TypeError, "of object"),
    ([[1, 2, 3, 4], [1]], TypeError, "is not an array"),
    (np.ma.masked_array(ONE, ONE > 0), TypeError, "is a masked array"),
    (ONE * 1e300, ValueError, r"has 1e\+300 \(float64\), which float32 makes inf"),
    (np.full((1, 4), 2**24 + 1), ValueError, "has 16777217 .int64., which float32 makes 16777216.0"),
    (np.full((1, 4), 2**63 - 1), ValueError, "has 9223372036854775807"),
    (np.full((1, 4), 2**64 - 1, np.uint64), ValueError, "has 18446744073709551615"),
    (np.ones((1, 5)), ValueError, r"of shape \(1, 5\) for 1 ids of 4 numbers"),
    (np.ones(4), ValueError, r"of shape \(4,\)"),
    (np.ones((2, 4)), ValueError, r"of shape \(2, 4\)"),
]


@pytest.mark.parametrize(("rows", "kind", "text"), ROWS, ids=[one[2] for one in ROWS])
def test_rows_that_would_become_others_are_refused(
    servers: Servers, rows: Any, kind: type[Exception], text: str
) -> None:
    table = Table(servers, "rows", 4, Sum())
    with pytest.raises(kind, match=f"table 'rows': gradients {text}"):
        table.push([1], rows)
    with pytest.raises(kind, match=f"table 'rows': rows {text}"):
        table.assign([1], rows)
    assert (table.pull([1]) == 0).all()


def test_floats_are_rounded_and_integers_are_exact(servers: Servers) -> None:
    table = Table(servers, "rounded", 3, Sum())
    for rows in (
        np.array([[0.1, np.inf, 2.5]]),
        np.array([[0.5, 1, 2]], np.float16),
        np.array([[1 << 24, -7, 1 << 40]]),
    ):
        table.assign([1], rows)
        assert table.pull([1]).tolist() == rows.astype(np.float32).tolist()


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ({"dim": 4.5}, TypeError), ({"dim": True}, TypeError), ({"dim": 0}, ValueError), ({"staleness": True}, TypeError),
        ({"staleness": 1.0}, TypeError), ({"staleness": 1 << 40}, ValueError), ({"average": 1}, TypeError),
        ({"seed": -1}, ValueError), ({"seed": 1.5}, TypeError), ({"spread": float("nan")}, ValueError),
        ({"spread": 1e300}, ValueError), ({"spread": 1j}, TypeError), ({"initial": []}, ValueError),
        ({"optimizer": "sgd"}, TypeError), ({"name": ""}, ValueError), ({"name": "a\0b"}, ValueError),
        ({"name": b"a"}, TypeError), ({"name": "\ud800"}, ValueError), ({"name": "n" * 201}, ValueError),
    ],
)  # fmt: skip
def test_a_table_is_described_with_numbers_that_stay_what_they_are(
    servers: Servers, argument: dict[str, Any], kind: type[Exception]
) -> None:
    given = {"name": "t", "dim": 4, **argument}
    (name,) = argument
    with pytest.raises(kind, match="table") as raised:
        Table(servers, **given)
    assert name == "name" or f"{name}=" in str(raised.value), raised.value


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf"), 1e300, 1e-60, True, "0.1", 1j, None])
def test_a_learning_rate_is_a_number_that_float32_has(lr: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="lr="):
        SGD(lr=lr).native()
    with pytest.raises((TypeError, ValueError), match="beta2="):
        Adam(betas=(0.9, 0.99999999999)).native()  # float32 makes it 1, and the first step a division by 0
    assert SGD(lr=1).native()["learning_rate"] == 1.0


NAMES = [
    "a/b", "a_b", "A_b", "a%2fb", "..", ".", "../../x", "a b", "\u00e9", "e\u0301", "n" * 200, "n" * 199 + "m",
    "a_b.json", "a_b.0-p00000-00000", "con", "-rf", "\n",
]  # fmt: skip


def test_tables_with_any_names_share_no_file(servers: Servers, tmp_path: Path) -> None:
    place = tmp_path / "one" / "saves"
    tables = [Table(servers, name, 2, Sum()) for name in NAMES]
    for number, table in enumerate(tables):
        table.assign([1], [[number, number]])
    for table in (*tables, *tables):  # a second save removes the files of the first, and no other's
        table.save(place)
    assert os.listdir(tmp_path) == ["one"] and os.listdir(tmp_path / "one") == ["saves"], "no name leads out"
    assert len({name.lower() for name in os.listdir(place)}) == len(os.listdir(place)) == 2 * len(NAMES)
    for number, table in enumerate(tables):
        table.assign([1], [[-1, -1]])
        assert table.load(place) == 1 and table.pull([1]).tolist() == [[number] * 2], table.name


def test_a_damaged_save_is_refused_and_the_table_stays_as_it_is(servers: Servers, tmp_path: Path) -> None:
    table, ids = Table(servers, "whole", 4, Sum()), np.arange(100)
    table.push(ids, np.ones((100, 4)))
    table.save(tmp_path)
    table.assign(ids, np.zeros((100, 4)))
    for name in os.listdir(tmp_path):
        place = tmp_path / name
        content = place.read_bytes()
        flipped = bytearray(content)
        flipped[
            content.rindex(b"\0\0\x80\x3f") + 3 if name != "whole.json" else content.index(b"rows") + 7
        ] ^= 0x40
        for other in (bytes(flipped), content[:-1], content + b"\0", b"", b"{}", b"[" * 100_000):
            place.write_bytes(other)
            with pytest.raises(
                errors.HorovodInternalError, match=f"{name} is (damaged|not a save of a table)"
            ):
                table.load(tmp_path)
        place.unlink()
        with pytest.raises(errors.HorovodInternalError, match=f"{name} cannot be read"):
            table.load(tmp_path)
        place.write_bytes(content)
        assert (table.pull(ids) == 0).all()
    manifest = tmp_path / "whole.json"
    other = Table(servers, "other", 4, Sum())
    (tmp_path / "other.json").write_bytes(manifest.read_bytes())
    with pytest.raises(errors.HorovodInternalError, match=r"other\.json is of table 'whole'"):
        other.load(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({**json.loads(manifest.read_text()), "version": 1}))
    with pytest.raises(errors.HorovodInternalError, match=r"has version 1 of the format"):
        other.load(tmp_path)
    assert table.load(tmp_path) == 100 and (table.pull(ids) == 1).all()


def test_what_saves_that_died_have_left_goes_with_the_next(servers: Servers, tmp_path: Path) -> None:
    table = Table(servers, "left/over", 4, Sum())
    table.push([1], ONE)
    stem = files.stem_of("left/over")
    for name in (
        f".incomplete-{stem}.ab-p00000-00000.safetensors-xyz",
        f"{stem}.ab-p00000-00000.safetensors",
    ):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "mine.safetensors").write_bytes(b"x")
    table.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 3 and (tmp_path / "mine.safetensors").exists()


def test_torchs_embedding_takes_integers_only(servers: Servers) -> None:
    bag = ps.EmbeddingBag("bag", None, 4, servers, mode="sum", optimizer=SGD(lr=1.0))
    for wrong in (torch.tensor([[1.7]]), torch.tensor([[True]]), torch.tensor([[1j]])):
        with pytest.raises(TypeError, match=f"table 'bag': input of {wrong.dtype}"):
            bag(wrong)
        with pytest.raises(TypeError, match="ids are integers"):
            bag.prefetch(wrong)
    with pytest.raises(ValueError, match="input has id 9223372036854775813"):
        bag(torch.tensor([[2**63 + 5]], dtype=torch.uint64))
    with pytest.raises(TypeError, match="input="):
        bag([[1]])
    with pytest.raises(TypeError, match="num_embeddings=3.5"):
        ps.EmbeddingBag("half", 3.5, 4, servers, optimizer=SGD(lr=1.0))
    few = ps.EmbeddingBag("few", 200, 4, servers, mode="sum", optimizer=SGD(lr=1.0))
    assert few(torch.tensor([[199]], dtype=torch.uint8)).shape == (
        1,
        4,
    )  # 200 is no number of uint8 as a signed one
    with pytest.raises(IndexError, match="id 200"):
        few(torch.tensor([[200]], dtype=torch.uint8))


def test_keys_hold_what_they_were_given(servers: Servers) -> None:
    store = ps.KVStore(servers)
    for wrong in (torch.arange(3), torch.ones(3) * 1j, torch.ones(3) > 0, torch.eye(3).to_sparse()):
        with pytest.raises(TypeError, match=r"key 'k': value is a tensor of"):
            store.init("k", wrong)
    with pytest.raises(TypeError, match="key 'k': value=1"):
        store.init("k", 1)
    for name, kind in (("", ValueError), ("a\0", ValueError), (3, TypeError), ("n" * 198, ValueError)):
        with pytest.raises(kind, match=r"(key|table) "):
            store.init(name, torch.ones(3))
    with pytest.raises(ValueError, match=r"key 'large': value has 1e\+300 .* too large for torch.float32"):
        store.init("large", torch.full((3,), 1e300, dtype=torch.float64))
    store.init("large", torch.full((2, 3), 1e6))  # a failed init() leaves nothing behind
    for out in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3) * 1j):
        with pytest.raises(TypeError, match="key 'large': out is a tensor of"):
            store.pull("large", out)
    with pytest.raises(ValueError, match=r"the weights has 1000000.0 .* too large for torch.float16"):
        store.pull("large", torch.zeros(2, 3, dtype=torch.float16))
    for turned in (torch.ones(3, 2), torch.ones(6)):
        with pytest.raises(
            ValueError, match=r"key 'large' has shape \[2, 3\]: gradient, a tensor of 6 elements"
        ):
            store.push("large", turned)
    store.push("large", torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(store.pull("large", torch.zeros(2, 3)), torch.full((2, 3), 1e6 + 1))
