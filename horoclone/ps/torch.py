"""A parameter server for PyTorch: embeddings whose rows live on servers, and dense keys in PS-Lite's manner.

    from horoclone.ps import torch as ps
    servers = ps.Servers("ads", "host:29400")
    table = ps.EmbeddingBag("user", None, 64, servers, optimizer=ps.RowWiseAdagrad(lr=0.05), staleness=4)

Gradients go to the servers in backward(), where the table's optimizer takes its step: the embedding has no parameters
for an optimizer of torch. docs/parameter_server.md has the rest. Needs CPU tensors; others are copied.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import gc
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.nn.functional as functional
from torch.autograd.graph import increment_version

from horoclone.arguments import given
from horoclone.ps import SGD, Adagrad, Adam, RowWiseAdagrad, Servers, Sum, Table
from horoclone.ps.numbers import check_name, whole_number
from horoclone.ps.optimizers import Optimizer
from horoclone.ps.table import seed_of

__all__ = ["SGD", "Adagrad", "Adam", "EmbeddingBag", "KVStore", "RowWiseAdagrad", "Servers", "Sum", "Table"]

PIECE = 1 << 18  # float32 of a dense key in one row at most: 1 MiB, so that a large key lies on all servers
READY_S = 60.0
_IDS = torch.iinfo(torch.int64)
_ROWS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class EmbeddingBag(torch.nn.Module):
    """Does what torch.nn.EmbeddingBag does, with its rows on the servers. num_embeddings=None: any int64 is an id.

    A forward pass in training pulls the rows of its ids once each, and the backward pass pushes their gradients: one
    step of the table. In evaluation nothing is pushed and nobody is waited for. Rows begin as torch's do, normal with
    deviation 1, or as `initial` and `spread` say. staleness, average: see Table. scaler: the torch.amp.GradScaler of
    the loss, which may also be set later; what is pushed is divided by its scale, and a step without rows where it is
    not finite. Without it a scaler that this process has is a RuntimeError in the first backward pass.
    """

    def __init__(
        self,
        name: str,
        num_embeddings: int | None,
        embedding_dim: int,
        servers: Servers,
        *,
        mode: str = "mean",
        optimizer: Optimizer,
        staleness: int | None = None,
        average: bool = True,
        initial: str = "normal",
        spread: float = 1.0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"table {name!r}: mode={mode!r}; sum, mean or max is possible")
        if num_embeddings is not None:
            num_embeddings = whole_number(
                f"table {name!r}", "num_embeddings", num_embeddings, 1, _IDS.max, "None, or "
            )
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.table = Table(
            servers,
            name,
            embedding_dim,
            optimizer,
            staleness=staleness,
            average=average,
            initial=initial,
            spread=spread,
            seed=seed_of(name),
        )
        self.scaler = scaler
        self._ahead: tuple[torch.Tensor, Future[torch.Tensor]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._second: Servers | None = None  # connections of the prefetching thread

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns a tensor of shape (bags, embedding_dim), on the input's device; input and offsets as
        torch.nn.EmbeddingBag takes them.

        IndexError for an id outside num_embeddings, TypeError for ids that are no integers; else as Table.pull and
        Table.push.
        """
        unique, places = torch.unique(self._checked(input), return_inverse=True)
        rows = self._rows(unique).to(input.device)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda rows: self._push(unique, rows))
        return functional.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights
        )

    def prefetch(self, input: torch.Tensor) -> None:
        """Pulls the rows of the next forward pass while this step goes on; they are one step older than without.

        ValueError with staleness 0, where the next round cannot be seen before this one is pushed.
        """
        if self.table.staleness == 0:
            raise ValueError(f"table {self.table.name!r}: prefetch() reads one step back, and staleness is 0")
        if self._pool is None or self._second is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hc-ps-prefetch")
            self._second = self.table.servers.another()
        unique = torch.unique(self._checked(input))
        self._ahead = unique, self._pool.submit(self._pull, unique, self._second)

    def save(self, path: str) -> int:
        """Saves the rows of the table; see Table.save."""
        return self.table.save(path)

    def load(self, path: str) -> int:
        """Loads rows that save() wrote; see Table.load."""
        return self.table.load(path)

    def _checked(self, input: torch.Tensor) -> torch.Tensor:
        table = f"table {self.table.name!r}"
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"{table}: input={given(input)}; a tensor of integers is needed")
        if input.dtype is torch.bool or input.is_floating_point() or input.is_complex() or input.is_quantized:
            first = f", the first is {input.reshape(-1)[0].item()}" if input.numel() else ""
            raise TypeError(f"{table}: input of {input.dtype}{first}; ids are integers")
        if input.dtype is getattr(torch, "uint64", None) and (large := _beyond_int64(input)) is not None:
            raise ValueError(f"{table}: input has id {large}, and ids are int64: at most {_IDS.max}")
        if self.num_embeddings is not None and input.numel():
            ids = input.detach().reshape(-1).to(torch.int64)
            wrong = ids[(ids < 0) | (ids >= self.num_embeddings)]
            if len(wrong):
                raise IndexError(
                    f"table {self.table.name!r} has {self.num_embeddings} rows, and id {int(wrong[0])} is none of them"
                )
        return input.detach().to(torch.int64)

    def _rows(self, unique: torch.Tensor) -> torch.Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            rows = ahead[1].result()
            if torch.equal(ahead[0], unique):
                return rows
        return self._pull(unique, None)

    def _pull(self, unique: torch.Tensor, by: Servers | None) -> torch.Tensor:
        unique = unique.cpu()
        rows = torch.empty(len(unique), self.embedding_dim, dtype=torch.float32, device="cpu")
        self.table.pull_into(unique.data_ptr(), len(unique), rows.data_ptr(), alone=not self.training, by=by)
        return rows

    def _push(self, unique: torch.Tensor, rows: torch.Tensor) -> None:
        if rows.grad is None:
            return
        gradient = rows.grad.to("cpu", torch.float32).contiguous()
        ids = unique.cpu()
        if self.scaler is not None and self.scaler.is_enabled():
            gradient = gradient / self.scaler.get_scale()
            if not gradient.isfinite().all():  # the other workers wait for its step nevertheless
                ids = ids[:0]
        elif self.scaler is None and self.table.steps == 0:
            self._check_not_scaled()
        self.table.push_from(ids.data_ptr(), len(ids), gradient.data_ptr())
        rows.grad = None

    def _check_not_scaled(self) -> None:
        """RuntimeError where there is a gradient scaler: gradients do not show whether their loss was scaled."""
        if any(issubclass(type(one), torch.amp.GradScaler) and one.is_enabled() for one in gc.get_objects()):
            raise RuntimeError(
                f"table {self.table.name!r}: a GradScaler is enabled, and backward() pushes gradients before it takes "
                "its factor out. Give it to EmbeddingBag(..., scaler=scaler); or, if this table's loss is not scaled, "
                "scaler=torch.amp.GradScaler(enabled=False)"
            )


class KVStore:
    """Keeps dense tensors by key, in the manner of PS-Lite and MXNet: push a gradient, pull the weights.

    optimizer: what servers do with a push (Sum adds it). staleness, average: see Table. Large tensors are cut into
    pieces of at most 1 MiB that lie on all servers.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        optimizer: Optimizer | None = None,
        staleness: int | None = None,
        average: bool = True,
    ) -> None:
        self.servers, self._optimizer = servers, optimizer or Sum()
        self._staleness, self._average = staleness, average
        self._keys: dict[str, _Key] = {}

    def init(self, key: str, value: torch.Tensor) -> None:
        """Sets a key's first value. Every worker calls it; the value of rank 0 counts, unless the key is there already.
        Servers keep float32: of other floats the nearest; a tensor of integers or complex numbers is a TypeError, here
        and in push() and pull().
        """
        check_name("key", key)
        check_name("table", f"kv/{key}")  # with the name of its table
        if key in self._keys:
            raise ValueError(f"key {key!r} exists")
        _check_tensor(key, "value", value)
        _check_finite(key, "value", value, value.float())  # before servers hear of the key
        if value.numel() == 0:
            raise ValueError(f"key {key!r}: an empty tensor")
        rows = math.ceil(value.numel() / PIECE)
        # Pieces of equal size, if there are such: they are sent and received where the tensor lies.
        rows = next((even for even in range(rows, 2 * rows) if value.numel() % even == 0), rows)
        table = Table(
            self.servers,
            f"kv/{key}",
            math.ceil(value.numel() / rows),
            self._optimizer,
            staleness=self._staleness,
            average=self._average,
            dense=True,
        )
        entry = _Key(table, torch.arange(rows, device="cpu"), value.shape)
        ready = f"ready/{table.name}"
        if self.servers.rank == 0:
            pieces = entry.filled(key, "value", value)
            table.assign_from(entry.ids.data_ptr(), rows, pieces.data_ptr(), only_new=True)
            self.servers.register.set(ready, list(value.shape) or [1])
        else:
            what = f"rank 0 has not called init({key!r}) within {READY_S:g} s"
            shape = self.servers.register.wait(ready, bool, time.monotonic() + READY_S, what)
            if shape != (list(value.shape) or [1]):
                raise ValueError(f"key {key!r} has shape {shape} on rank 0, and {list(value.shape)} here")
        self._keys[key] = entry

    def push(self, key: str, gradient: torch.Tensor) -> None:
        """Pushes a gradient, which is one step of this worker. ValueError for an unknown key, another shape, or a
        number that float32 makes infinite."""
        entry = self._entry(key, "gradient", gradient)
        pieces = entry.filled(key, "gradient", gradient)
        entry.table.push_from(entry.ids.data_ptr(), len(entry.ids), pieces.data_ptr())

    def pull(self, key: str, out: torch.Tensor) -> torch.Tensor:
        """Copies the weights into `out`, which is returned; in its dtype, where that is another float. After an error
        it may have some of them."""
        entry = self._entry(key, "out", out)
        pieces = out if entry.lies_as_pieces(out) else entry.room()
        entry.table.pull_into(entry.ids.data_ptr(), len(entry.ids), pieces.data_ptr())
        if pieces is out:
            increment_version(out)  # autograd has to know, as it would of copy_()
            return out
        weights = pieces.reshape(-1)[: out.numel()].reshape(out.shape)
        with torch.no_grad():
            out.copy_(weights)
        _check_finite(key, "the weights", weights, out)
        return out

    def _entry(self, key: str, argument: str, tensor: torch.Tensor) -> _Key:
        if key not in self._keys:
            raise ValueError(f"key {key!r} is unknown; call init({key!r}, tensor) in every worker first")
        _check_tensor(key, argument, tensor)
        entry = self._keys[key]
        if tensor.shape != entry.shape:
            raise ValueError(
                f"key {key!r} has shape {list(entry.shape)}: {argument}, a tensor of {tensor.numel()} elements with "
                f"shape {list(tensor.shape)}, does not fit"
            )
        return entry


def _check_tensor(key: str, argument: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"key {key!r}: {argument}={given(tensor)}; a tensor is needed")
    if tensor.dtype not in _ROWS or tensor.layout != torch.strided:
        raise TypeError(
            f"key {key!r}: {argument} is a tensor of {tensor.dtype}, {tensor.layout}; servers keep float32, so a "
            "dense tensor of floats is needed"
        )


def _check_finite(key: str, what: str, source: torch.Tensor, copy: torch.Tensor) -> None:
    """ValueError where a finite number has become infinite in a copy of fewer bits."""
    if source.dtype.itemsize > copy.dtype.itemsize and bool(
        (changed := torch.isinf(copy.detach()).to(source.device) & ~torch.isinf(source)).any()
    ):
        first = source.detach()[changed].reshape(-1)[0].item()
        raise ValueError(f"key {key!r}: {what} has {first} ({source.dtype}), too large for {copy.dtype}")


def _beyond_int64(ids: torch.Tensor) -> int | None:
    """An id that int64 would wrap around."""
    wrapped = ids.detach().reshape(-1).to(torch.int64)
    wrong = wrapped[wrapped < 0]
    return int(wrong[0]) + (1 << 64) if len(wrong) else None


class _Key:
    """A dense key: rows of its table that are pieces of one tensor; the end of the last one may be padding."""

    def __init__(self, table: Table, ids: torch.Tensor, shape: torch.Size) -> None:
        self.table, self.ids, self.shape = table, ids, shape
        self._room: torch.Tensor | None = None

    def room(self) -> torch.Tensor:
        """Memory for the pieces, where the tensor's own will not do."""
        if self._room is None:
            self._room = torch.zeros(len(self.ids), self.table.dim, dtype=torch.float32, device="cpu")
        return self._room

    def lies_as_pieces(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is that of all pieces, one after the other."""
        return (
            tensor.device.type == "cpu"
            and tensor.dtype == torch.float32
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()  # it shows its memory's numbers with the other sign
            and tensor.numel() == len(self.ids) * self.table.dim
        )

    def filled(self, key: str, argument: str, value: torch.Tensor) -> torch.Tensor:
        """The pieces of a tensor, for as long as it does not change."""
        if self.lies_as_pieces(value):
            return value
        room, flat = self.room(), value.detach().reshape(-1)
        room.reshape(-1)[: len(flat)].copy_(flat)
        _check_finite(key, argument, flat, room.reshape(-1)[: len(flat)])
        return room
