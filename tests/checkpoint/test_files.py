"""Saves on disk, in one process: what comes back, what is refused, and that a kill at any moment harms no earlier save."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import math
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import world

from horoclone import checkpoint
from horoclone.checkpoint import CheckpointError, NothingSaved, Owned, files, load, owner
from horoclone.checkpoint.image import Image, from_a_page
from horoclone.checkpoint.leaves import NUMPY
from horoclone.checkpoint.saving import Save, shares
from horoclone.checkpoint.tree import Flat

fakes = world.load(Path(__file__).with_name("fakes.py"), "checkpoint_fakes")


class Moments(NamedTuple):
    mean: Any
    count: int


def a_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": np.full((5, 3), value, np.float32), "b": np.arange(7), "a.b": np.ones(2), "a": {"b": np.zeros(2)}},
        "optimizer": {"state": {0: {"step": np.float32(value)}, 1: Moments(np.zeros((0, 2)), 4)}, "groups": [{"lr": 0.1}]},
        "epoch": int(value), "name": "run", "best": -math.inf, "done": False, "none": None, "pair": (1, "x"),
    }  # fmt: skip


def save_on(path: Path, states: list[Any], keep: int = 3, timeout_s: float = 20.0) -> list[Save]:
    """A save of len(states) ranks, as threads of this process; raises what rank 0 failed with."""
    together = fakes.Ranks(len(states))
    every = [Save(path, state, keep, timeout_s, together.of(rank)) for rank, state in enumerate(states)]
    for one in every:
        one.start()
    for one in every:
        one.wait()
    if every[0].error is not None:
        raise every[0].error
    return every


def inside(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != owner.NAME)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_was_saved_comes_back(tmp_path: Path, size: int) -> None:
    save_on(tmp_path, [a_state()] * size)
    assert same(load(tmp_path), a_state())
    again = load(tmp_path, like=a_state(9))
    assert same(again, a_state()) and isinstance(again["optimizer"]["state"][1], Moments)
    assert len(list((tmp_path / "save-00000001").glob("*.safetensors"))) == size


def test_every_array_is_written_once_and_the_bytes_are_spread() -> None:
    sizes = [100, 1, 50, 50, 2, 97]
    owners = shares(sizes, 3)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)
    ]
    assert sum(loads) == sum(sizes) and max(loads) - min(loads) <= 3


def test_a_save_that_was_given_up_does_not_appear_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write = threading.Event(), files.write_manifest

    def write_late(*arguments: Any) -> None:
        goes_on.wait(20)
        write(*arguments)

    monkeypatch.setattr(files, "write_manifest", write_late)
    save = Save(tmp_path, a_state(), 3, 0.1, fakes.Ranks(1))
    save.start()
    save.wait()
    goes_on.set()
    assert save._thread is not None
    save._thread.join()
    assert "the save is given up" in str(save.error) and checkpoint.saves(tmp_path) == []


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "uint32", "int64", "float16", "float64", "complex64", ">f4"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2)])
def test_every_dtype_and_shape(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    save_on(tmp_path, [{"x": array, "t": array.T}])
    found = load(tmp_path)
    assert found["x"].dtype == array.dtype and np.array_equal(found["x"], array)
    assert found["t"].shape == array.T.shape and np.array_equal(found["t"], array.T)


def test_bfloat16_in_numpy(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    array = np.arange(6).astype(ml_dtypes.bfloat16)
    save_on(tmp_path, [array])
    assert same(load(tmp_path), array)


def test_the_files_are_those_of_the_library(tmp_path: Path) -> None:
    library = importlib.import_module("safetensors.numpy")
    save_on(tmp_path, [a_state()])
    (name,) = (tmp_path / "save-00000001").glob("*.safetensors")
    found = library.load_file(name)
    assert same(found["model.w"], a_state()["model"]["w"]) and "model.a.b#2" in found and len(found) == 6


def test_saves_of_version_1_load_and_are_compared_with_their_sha256(tmp_path: Path) -> None:
    """Written by the release that had no version 2."""
    place = shutil.copytree(Path(__file__).with_name("version1"), tmp_path, dirs_exist_ok=True)
    found = load(place)
    assert same(found["w"], np.arange(6, dtype=np.float32).reshape(2, 3)) and found["best"] == -math.inf
    assert same(found["b"], [np.arange(5), np.float16(0.5)]) and found["epoch"] == 7
    assert [(one["of"], one["piece"].tolist()) for one in found["mine"]] == [(0, [0]), (1, [1, 1])]
    name = place / "save-00000001" / "rank-00000.safetensors"
    name.write_bytes(name.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="damaged: its bytes do not have the checksum"):
        load(place)


@pytest.mark.parametrize("elements", [1, files.PAGE, 5 * files.PAGE, 5 * files.PAGE + 1])
@pytest.mark.parametrize("cannot", ["nothing", "set the flag", "write"])
def test_a_file_is_the_same_where_the_page_cache_cannot_be_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cannot: str, elements: int
) -> None:
    monkeypatch.setattr(files, "_PIECE", 2 * files.PAGE)
    past_the_cache: list[bool] = []

    def write(file: int, data: memoryview) -> int:
        past_the_cache.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        if cannot == "write" and past_the_cache[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.write(file, data)

    def set_flag(file: int, what: int, value: int = 0) -> int:
        if cannot == "set the flag" and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl.fcntl(file, what, value)

    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "write": write}))
    monkeypatch.setattr(files, "fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": set_flag}))
    values = np.arange(elements) % 251
    image = Image(Flat({"x": values.astype(np.uint8), "wide": np.arange(3.0)}).leaves)
    data = image.filled(from_a_page(image.nbytes))
    written = files.write_arrays(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data.tobytes() and written.nbytes == data.nbytes
    assert written.digest == f"crc32:{zlib.crc32(data):08x}"
    library = importlib.import_module("safetensors.numpy")
    assert same(library.load_file(tmp_path / "file")["x"], values.astype(np.uint8))
    if cannot == "nothing" and not any(past_the_cache):
        pytest.skip("the file system of temporary files knows no O_DIRECT")
    whole, rest = divmod(data.nbytes, files.PAGE)
    writes = {"nothing": [True] * -(-whole // 2) + [False] * bool(rest)}
    expected = {
        **writes,
        "set the flag": [False] * len(writes["nothing"]),
        "write": [True] + [False] * len(writes["nothing"]),
    }
    assert past_the_cache == expected[cannot]


def test_owned_values_of_all_ranks_come_back_on_any_number(tmp_path: Path) -> None:
    states = [
        {"w": np.ones(3), "mine": Owned({"piece": np.full(rank + 1, rank), "at": rank})} for rank in range(3)
    ]
    save_on(tmp_path, states)
    for found in (load(tmp_path)["mine"], load(tmp_path, like=states[0])["mine"]):
        assert len(found) == 3 and [one["at"] for one in found] == [0, 1, 2]
        assert np.array_equal(np.concatenate([one["piece"] for one in found]), [0, 1, 1, 2, 2, 2])
        assert [one["at"] for one in found[1:]] == [1, 2]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for value in range(5):
        save_on(tmp_path, [a_state(value)] * 2, keep=2)
    assert checkpoint.saves(tmp_path) == [4, 5] and inside(tmp_path) == ["save-00000004", "save-00000005"]
    assert load(tmp_path)["epoch"] == 4 and load(tmp_path, number=4)["epoch"] == 3


@pytest.mark.parametrize("locks", [True, False])
def test_what_saves_that_died_have_left_is_ignored_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """At once where this job is known to be the only one that lives; else what nobody has written to for a day."""
    save_on(tmp_path, [a_state(1)])
    names = [f".{word}-00000002-{n:02x}" for word in ("incomplete", "removed") for n in range(50)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"x")
    young, old = tmp_path / names[0], tmp_path / names[1]
    long_ago = time.time() - files.STALE_S - 60
    for place in (old / "rank-00000.safetensors", old):
        os.utime(place, (long_ago, long_ago))
    assert load(tmp_path)["epoch"] == 1 and checkpoint.saves(tmp_path) == [1]
    if not locks:
        monkeypatch.setattr(owner, "claim", lambda path: False)
    save_on(tmp_path, [a_state(2)])
    assert young.exists() is not locks and not old.exists() and load(tmp_path)["epoch"] == 2
    if locks:
        assert inside(tmp_path) == ["save-00000001", "save-00000002"]


def test_nothing_saved(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NothingSaved, match="no complete save in"):
            load(path)
        assert checkpoint.saves(path) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save_on(tmp_path, [{**a_state(), "mine": Owned(np.ones(2))}] * 2)
    for name in ("rank-00001.safetensors", "rank-00001.own.safetensors"):
        place = tmp_path / "save-00000001" / name
        hidden = place.rename(tmp_path / "hidden")
        with pytest.raises(CheckpointError, match=rf"{name}, which the manifest names, is missing"):
            load(tmp_path)
        hidden.rename(place)
    load(tmp_path)


def test_a_newest_save_without_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    save_on(tmp_path, [a_state(1)])
    save_on(tmp_path, [a_state(2)])
    (tmp_path / "save-00000002" / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"save-00000002/manifest\.json is missing.*number=N"):
        load(tmp_path)
    assert checkpoint.saves(tmp_path) == [1] and load(tmp_path, number=1)["epoch"] == 1
    save_on(tmp_path, [a_state(3)])
    assert load(tmp_path)["epoch"] == 3


def everything(path: Path) -> Any:
    """What is Owned is read when it is asked for."""
    found = load(path)
    return {**found, "mine": list(found["mine"])}


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "rank-00001.own.safetensors", files.MANIFEST])  # fmt: skip
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, name: str) -> None:
    states = [{**a_state(), "mine": Owned({"piece": np.full(3, rank)})} for rank in range(2)]
    save_on(tmp_path, states)
    expected = everything(tmp_path)
    place = tmp_path / "save-00000001" / name
    whole = place.read_bytes()
    chosen = random.Random(name)
    told = [at for at, byte in enumerate(whole) if byte != ord(" ")]
    bits = {8 * at + chosen.randrange(8) for at in (*told[::3], *range(0, len(whole), 50))}
    for bit in sorted(bits | {chosen.randrange(8 * len(whole)) for _ in range(300)}):
        at = bit // 8
        place.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit % 8)]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged|version|not written by"):
            everything(tmp_path)
    for other in (whole[:-1], whole + b"\0", b"", whole[:8], bytes(len(whole))):
        place.write_bytes(other)
        with pytest.raises(CheckpointError, match="damaged|not written by"):
            everything(tmp_path)
    place.write_bytes(whole)
    assert same(everything(tmp_path), expected)


def test_a_disk_that_does_not_answer_ends_the_save_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_on(tmp_path, [a_state(1)])
    answers = threading.Event()
    real = files._write_all
    monkeypatch.setattr(files, "_write_all", lambda *args: (answers.wait(20), real(*args)))
    try:
        began = time.monotonic()
        with pytest.raises(
            CheckpointError, match=r"rank 0 still writes to .* after 0\.2 s.*file system answers"
        ):
            save_on(tmp_path, [a_state(2)], timeout_s=0.2)
        assert time.monotonic() - began < 10 and load(tmp_path)["epoch"] == 1
    finally:
        answers.set()


def test_manifests_of_others_are_refused(tmp_path: Path) -> None:
    save_on(tmp_path, [a_state()])
    save_on(tmp_path, [a_state()])
    manifest = tmp_path / "save-00000002" / files.MANIFEST
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**whole, "version": 3}))
    with pytest.raises(
        CheckpointError, match=r"has version 3 of the format, and this horoclone reads versions 1 and 2"
    ):
        load(tmp_path)
    manifest.write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"was not written by hvd\.checkpoint\.save"):
        load(tmp_path)
    manifest.write_text((tmp_path / "save-00000001" / files.MANIFEST).read_text())
    with pytest.raises(CheckpointError, match=r"has the manifest of another save \(number 1\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {"w": np.zeros(2)}}, r"state\['model'\] has the keys .* only in the save"),
        ({"pair": (1, 2, 3)}, r"state\['pair'\] is a tuple of 2 in the save and tuple of 3"),
        ({"epoch": np.zeros(2)}, r"state\['epoch'\] is int in the save and ndarray"),
        ({"more": 1}, r"\['more'\] only in `like`"),
    ],
)
def test_a_save_of_another_job_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    save_on(tmp_path, [a_state()])
    with pytest.raises(ValueError, match=text):
        load(tmp_path, like={**a_state(), **change})
    other = a_state()
    other["model"]["w"] = np.zeros((5, 4), np.float32)
    with pytest.raises(
        ValueError, match=r"state\['model'\]\['w'\] is F32\[5, 3\] in the save and F32\[5, 4\]"
    ):
        load(tmp_path, like=other)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"f": [print]}, r"state\['f'\]\[0\] is a builtins\.builtin_function_or_method, which cannot be saved"),
        ({(1, 2): 3}, "keys of a state that is saved are strings or integers"),
        ({"x": np.array([object()])}, r"state\['x'\]: arrays of object cannot be saved"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_named_on_every_rank(tmp_path: Path, state: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"rank 1 cannot save its state: .*{text}"):
        save_on(tmp_path, [a_state(), state])
    assert inside(tmp_path) == []


def test_states_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the state of rank 1 differs from that of rank 0"):
        save_on(tmp_path, [{"w": np.ones(3)}, {"w": np.ones(4)}])
    assert inside(tmp_path) == []
    save_on(tmp_path, [{"best": 0.5}, {"best": math.inf}])
    assert load(tmp_path) == {"best": 0.5}, "of numbers those of rank 0 are kept, whatever the others have"


def test_a_full_disk_leaves_the_save_before(tmp_path: Path) -> None:
    save_on(tmp_path, [a_state(1)] * 2)
    ignored, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        with pytest.raises(
            CheckpointError, match=r"rank [01] could not write to .*File too large.*Free room there"
        ):
            save_on(tmp_path, [{"w": np.zeros(1_000_000), "v": np.zeros(10)}] * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert inside(tmp_path) == ["save-00000001"] and load(tmp_path)["epoch"] == 1


def test_a_full_file_system_leaves_the_save_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs root: it mounts a small tmpfs")
    try:
        save_on(tmp_path, [a_state(1)] * 2)
        with pytest.raises(CheckpointError, match=r"No space left on device.*Free room there"):
            save_on(tmp_path, [{"w": np.zeros(1_000_000)}] * 2)
        assert inside(tmp_path) == ["save-00000001"] and load(tmp_path)["epoch"] == 1
        save_on(tmp_path, [a_state(2)] * 2)
        assert load(tmp_path)["epoch"] == 2
    finally:
        for file in owner._held.values():  # else it is in use for as long as this process lives
            os.close(file)
        owner._held.clear()
        subprocess.run(["umount", tmp_path], check=True)


def test_a_directory_that_is_read_only(tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    save_on(place, [a_state(1)])
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", place, place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs root: it mounts a directory read-only")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        text = r"rank 0 could not make a directory in .*Read-only file system.*Choose a directory that every rank may write"
        with pytest.raises(CheckpointError, match=text):
            save_on(place, [a_state(2)] * 2)
        assert load(place)["epoch"] == 1
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"File exists: .*Choose a directory that every rank may write"):
        save_on(tmp_path / "file", [a_state(1)])


def test_two_jobs_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.write_manifest

    def late(place: Path, content: Any) -> None:
        real(place, content)
        monkeypatch.setattr(files, "write_manifest", real)
        save_on(tmp_path, [a_state(7)])

    monkeypatch.setattr(files, "write_manifest", late)
    with pytest.raises(CheckpointError, match="two jobs save to"):
        save_on(tmp_path, [a_state(8)])
    assert load(tmp_path)["epoch"] == 7


def test_a_kill_at_any_system_call_leaves_a_whole_save_and_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path,
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("traced.py knows the numbers of the system calls of x86-64 only")
    command = [sys.executable, Path(__file__).with_name("traced.py"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if "ptrace(" in done.stderr:
        pytest.skip(f"this process may not trace its children: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    traced = json.loads(done.stdout)
    calls = [(name, Path(path).name.partition("-0000")[0]) for name, path in traced["calls"]]
    assert all(found in (1, 2) for _, found in traced["after"])
    assert {found for killed, found in traced["after"] if killed} == {1, 2}
    assert sum(killed for killed, _ in traced["after"]) > 25

    # A machine that loses its power forgets what no fsync has reached.
    files_at = [place for place, call in enumerate(calls) if call == ("fsync", "rank")]
    manifest = calls.index(("fsync", "manifest.json"))
    before, shown = calls.index(("fsync", ".incomplete"), manifest), calls.index(("rename", ""), manifest)
    assert len(files_at) == 2 and max(files_at) < calls.index(("write", "manifest.json")) < manifest
    assert manifest < before < shown < calls.index(("fsync", "clean"))
    assert not [call for call in calls[before:] if call[0] in ("write", "ftruncate", "fchmod")]


def test_the_registry_falls_back_on_numpy() -> None:
    from horoclone.checkpoint.leaves import kind_named

    assert kind_named("a framework that is not here") is NUMPY
