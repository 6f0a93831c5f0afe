"""Saves that torch.distributed.checkpoint writes and reads: Writer, Reader, and from_dcp and to_dcp for its own format.

    dcp.save(state, storage_writer=Writer(path))       dcp.load(state, storage_reader=Reader(path))

Ranks communicate in torch's process group, whatever its backend is. Sharded tensors (DTensor, FSDP2) are written as the
pieces that the ranks have, and read into any sharding. Thread: the one that calls torch.
"""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

import horoclone.checkpoint.torch  # noqa: F401 - tensors can be saved from here on
from horoclone.checkpoint import files
from horoclone.checkpoint.failures import CheckpointError
from horoclone.checkpoint.image import Image, from_a_page
from horoclone.checkpoint.leaves import Form, kind_named
from horoclone.checkpoint.loading import Reading, load
from horoclone.checkpoint.saving import save_alone
from horoclone.checkpoint.tree import Flat, Leaf, mapped

__all__ = ["Reader", "Writer", "from_dcp", "to_dcp"]

Path_ = str | os.PathLike[str]


class _Entry(NamedTuple):
    """What one item became: its node, whose arrays are numbered from 0, their rows, and for a piece where it lies."""

    node: Any
    rows: list[Any]
    offsets: list[int] | None
    whole: list[int]  # the shape of the array that this is a piece of


class Writer(StorageWriter):
    """Writes a new save below `path`, of which the `keep` newest stay. All ranks see that directory.

    Values other than tensors must be of the kinds that hvd.checkpoint.save() takes, else TypeError: no pickle is
    written.
    """

    def __init__(self, path: Path_, keep: int = 3) -> None:
        super().__init__()
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 save is kept")
        self.path, self.keep, self._name = Path(os.path.abspath(path)), keep, ""

    def reset(self, checkpoint_id: Path_ | None = None) -> None:
        """Takes another path, which dcp.save(checkpoint_id=) gives."""
        if checkpoint_id is not None:
            self.path = Path(os.path.abspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the coordinator makes the directory when it has all plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells everybody the directory; called on the coordinator."""
        files.end(self._name)  # of a save that failed
        self._number, name = files.begin(self.path)
        self._name = name
        return [dataclasses.replace(plan, storage_data=(name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Writes this rank's file; when it returns, that is on disk."""
        name, rank = plan.storage_data
        arrays: dict[str, Leaf] = {}
        entries = [self._taken(item, planner, arrays) for item in plan.items]
        image = Image(list(arrays.values()))
        written = files.write_arrays(
            self.path / name / f"rank-{rank:05d}.safetensors", image.filled(from_a_page(image.nbytes))
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, 0, (name, rank, tuple(written), tuple(entry)))
                for item, entry in zip(plan.items, entries, strict=True)
            ]
        )
        return future

    def _taken(self, item: WriteItem, planner: Any, arrays: dict[str, Leaf]) -> _Entry:
        """Puts what an item has into the arrays of the file."""
        fqn, offsets, whole = item.index.fqn, None, []
        if item.type is WriteItemType.BYTE_IO:
            value = planner.lookup_object(item.index)
        else:
            value = planner.resolve_data(item)
            assert item.tensor_data is not None
            whole = list(item.tensor_data.size)
            if list(item.tensor_data.chunk.sizes) != whole:
                offsets = list(item.tensor_data.chunk.offsets)
        try:
            flat = Flat(value, f"state[{fqn!r}]")
        except TypeError as error:
            raise TypeError(f"{error} torch.distributed.checkpoint would pickle it.") from None
        if flat.owned:
            raise TypeError(f"state[{fqn!r}] holds an Owned, which is for hvd.checkpoint.save().")
        rows = []
        for leaf in flat.leaves:
            stored = fqn if leaf.name == "state" else f"{fqn}.{leaf.name}"
            stored += "" if offsets is None else "@" + ",".join(map(str, offsets))
            while stored in arrays:
                stored += "#"
            arrays[stored] = leaf._replace(name=stored)
            rows.append([stored, leaf.kind.name, leaf.form.dtype, list(leaf.form.shape)])
        return _Entry(flat.node, rows, offsets, whole)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the coordinator when everybody's file is on disk: writes the manifest and gives the save its
        name."""
        everything = [result for of_rank in results for result in of_rank]
        if not everything:
            raise CheckpointError("the state is empty: there is nothing to save")
        name = everything[0].storage_data[0]
        ranks = sorted({result.storage_data[1] for result in everything})
        file_of = {rank: place for place, rank in enumerate(ranks)}
        written = {result.storage_data[1]: result.storage_data[2] for result in everything}
        rows: list[Any] = []
        pieces: dict[str, list[Any]] = {}
        nodes: dict[str, Any] = {}
        for result in everything:
            _, rank, _, entry = result.storage_data
            node, own, offsets, whole = entry
            if offsets is None:
                nodes[result.index.fqn] = _Node(_renumbered(node, len(rows)))
                rows += [[*row, file_of[rank]] for row in own]
                continue
            if result.index.fqn not in nodes:
                nodes[result.index.fqn] = _Node({"array": len(rows)})
                rows.append([result.index.fqn, "torch", own[0][2], whole, -1])
            number = nodes[result.index.fqn].node["array"]
            pieces.setdefault(str(number), []).append([own[0][0], offsets, own[0][3], file_of[rank]])
        mapping = metadata.planner_data
        nested = nodes if mapping is None else unflatten_state_dict(nodes, mapping)
        content = {
            "node": _node_of(nested), "arrays": rows, "pieces": pieces, "number": self._number,
            "files": [list(written[rank]) for rank in ranks], "owned": [],
        }  # fmt: skip
        for rank in ranks:
            files.check_file(self.path / name, files.Written(*written[rank]))
        files.write_manifest(self.path / name, content)
        files.publish(self.path, name, self._number)
        files.end(name)
        files.tidy(self.path, self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """Returns whether this is a directory of a file system."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Returns where the save is written."""
        return StorageMeta(checkpoint_id=self.path, save_id=None)


class _Node(NamedTuple):
    """A node among dicts and lists of Python."""

    node: Any


def _renumbered(node: Any, by: int) -> Any:
    """The arrays of one item among those of all."""
    if not isinstance(node, dict):
        return node
    return (
        {"array": node["array"] + by} if "array" in node else mapped(node, lambda one: _renumbered(one, by))
    )


def _node_of(nested: Any) -> Any:
    if isinstance(nested, _Node):
        return nested.node
    if isinstance(nested, dict):
        return {"dict": [[key, _node_of(value)] for key, value in nested.items()]}
    if isinstance(nested, (list, tuple)):
        return {"tuple" if isinstance(nested, tuple) else "list": [_node_of(value) for value in nested]}
    return nested


class Reader(StorageReader):
    """Reads the newest complete save below `path`, or the one with that number, whichever save() wrote it.

    Each rank reads one file after the other, takes what it needs, and compares each with its checksum. What is Owned is
    not there. NothingSaved and CheckpointError as load() raises them.
    """

    def __init__(self, path: Path_, number: int | None = None) -> None:
        super().__init__()
        self.path, self.number = Path(os.path.abspath(path)), number

    def reset(self, checkpoint_id: Path_ | None = None) -> None:
        """Takes another path, which dcp.load(checkpoint_id=) gives."""
        if checkpoint_id is not None:
            self.path = Path(os.path.abspath(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns what the save holds, under the names that torch gives to the places of a nested state."""
        self._reading = Reading(self.path, self.number)
        nested = self._reading.built(lambda number, _: _Array(number), lambda _: _ABSENT)
        flat, mapping = flatten_state_dict(_shown(nested, self._reading))
        described: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        for fqn, value in flat.items():
            if value is _ABSENT:
                continue
            if isinstance(value, torch.Tensor):
                chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
                described[fqn] = TensorStorageMetadata(TensorProperties(value.dtype), value.size(), [chunk])
                self._values[fqn] = _Array(value.number)  # type: ignore[attr-defined]
            else:
                described[fqn] = BytesStorageMetadata()
                self._values[fqn] = value
        return Metadata(described, planner_data=mapping)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Takes the metadata; every rank reads for itself."""
        if not hasattr(self, "_reading"):
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Copies what the plan asks for out of each file."""
        tensors = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                text = io.BytesIO()
                torch.save(_filled(self._values[item.storage_index.fqn], self._reading), text)
                text.seek(0)
                planner.load_bytes(item, text)
            else:
                number = self._values[item.storage_index.fqn].number
                tensors.append((item, planner.resolve_tensor(item), number))
        for file in range(self._reading.count):
            wanted = [
                (item, target, piece)
                for item, target, number in tensors
                for piece in self._reading.pieces(number)
                if piece.file == file
            ]
            if wanted:
                arrays = self._reading.arrays(file)
                for item, target, piece in wanted:
                    form, data = arrays[piece.name]
                    tensor = kind_named("torch").made(form, data, None)
                    _copy_common(target.detach(), item.storage_offsets, tensor, piece.offsets)
        for item, target, _ in tensors:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """Returns whether this is a directory of a file system."""
        return "://" not in os.fspath(checkpoint_id)


def _copy_common(target: Any, at: Any, piece: Any, offsets: Any) -> None:
    """Copies what a piece that begins at `offsets` has of the box that begins at `at` and is as large as target."""
    into, out_of = [], []
    for place, (first, length, other, count) in enumerate(
        zip(at, target.shape, offsets, piece.shape, strict=True)
    ):
        begin, end = max(first, other), min(first + length, other + count)
        if begin >= end and target.shape[place]:
            return
        into.append(slice(begin - first, end - first))
        out_of.append(slice(begin - other, end - other))
    target[tuple(into)].copy_(piece[tuple(out_of)])


class _Array(NamedTuple):
    number: int


class _Absent:
    """Stands for what is Owned."""


_ABSENT = _Absent()


def _shown(value: Any, reading: Reading) -> Any:
    """Tensors of no memory in the places of arrays: torch flattens what holds tensors otherwise than the rest."""
    if isinstance(value, _Array):
        _, kind, dtype, shape, _ = reading.row(value.number)
        if kind.split()[0] != "torch":
            return value
        made = kind_named("torch").made
        tensor = torch.empty(shape, dtype=_dtype_of(dtype, made), device="meta")
        tensor.number = value.number  # type: ignore[attr-defined]
        return tensor
    if isinstance(value, dict):
        return {key: _shown(one, reading) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shown(one, reading) for one in value)
    return value


def _dtype_of(name: str, made: Any) -> torch.dtype:
    dtype: torch.dtype = made(Form(name, (0,)), None, None).dtype
    return dtype


def _filled(value: Any, reading: Reading) -> Any:
    """A value that is no tensor, with the arrays that are in it."""
    if isinstance(value, _Array):
        return reading.array(value.number)
    if isinstance(value, torch.Tensor):
        return reading.array(value.number)  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key: _filled(one, reading) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(one, reading) for one in value)
    return value


def to_dcp(path: Path_, directory: Path_, number: int | None = None) -> None:
    """Writes the newest save below `path` (or that number) as torch.distributed.checkpoint's own format.

    One process does it, and needs the memory of the whole state. torch pickles values other than tensors.
    """
    dcp.save(load(path, number=number), checkpoint_id=directory, no_dist=True)


def from_dcp(directory: Path_, path: Path_, keep: int = 3) -> Path:
    """Writes what dcp.save has written to `directory` as a new save below `path` and returns its directory.

    One process does it, and needs the memory of the whole state. torch unpickles values other than tensors: use it for
    checkpoints that you trust.
    """
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(directory),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return save_alone(Path(os.path.abspath(path)), state, keep)
