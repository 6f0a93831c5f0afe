"""Training whose results do not depend on how many processes there are (EasyScale, Li et al., SC'23)."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from horoclone.ops import Max
from horoclone.runtime.exported import rank, size
from horoclone.torch.mpi_ops import allgather, allreduce, alltoall

__all__ = ["VirtualLoader", "VirtualRanks"]

# A node of the tree in which values of virtual ranks are added: at level k, node i has those of i * 2^k and the 2^k - 1
# after it.
_Node = tuple[int, int]
_Tensors = list["torch.Tensor | None"]  # gradients, then buffers

# What random numbers are for: parts of the key from which they follow.
_STEP, _SAMPLES, _ORDER = 1, 2, 3


class VirtualRanks:
    """A fixed number of virtual ranks, shared out over the processes: the same bits for any number of those.

    model: the module whose gradients are averaged; parameters and buffers must be equal on all processes
    (hvd.broadcast_parameters()). size: how many virtual ranks, the same on all processes; each process runs those of
    `mine`, one after the other, none where there are more processes than virtual ranks. seed: an integer; the random
    numbers of torch, NumPy and Python follow from it, the step and the virtual rank.

        virtual = hvd.VirtualRanks(model, size=8)
        data = virtual.loader(dataset, batch_size=32)
        for step in range(steps):
            for rank in virtual.ranks(step):
                inputs, labels = data.batch(rank, step)
                loss_of(model(inputs), labels).backward()
            optimizer.step()  # torch's own optimizer

    Gradients, and buffers that a forward pass changes (running statistics), become the means over all virtual ranks,
    added in a binary tree over the virtual ranks. In an elastic job the virtual ranks are shared out anew after a loss
    or with a newcomer. Computation must be deterministic itself: the same kind of processor, number of threads and
    software everywhere, and torch.use_deterministic_algorithms() on GPUs.
    """

    def __init__(self, model: torch.nn.Module, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"VirtualRanks: size is {size}; it must be at least 1")
        if seed < 0:
            raise ValueError(f"VirtualRanks: seed is {seed}; it must be 0 or more")
        self.model, self.size, self.seed = model, size, seed

    @property
    def mine(self) -> range:
        """The virtual ranks that this process runs now."""
        return _share(rank(), size(), self.size)

    def ranks(self, step: int) -> Iterator[int]:
        """Gives this process's virtual ranks; when the loop over them has ended, gradients and buffers are the means.

        step: the number of the training step, from which random numbers follow; the same on all processes. Each virtual
        rank finds no gradients, and buffers as the step found them. After a loop that was left early there are no
        gradients. Parameters without a gradient on all virtual ranks have none afterwards. ValueError where size, seed
        or step differ between processes, or a gradient is sparse.
        """
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        buffers = list(self.model.buffers())
        before = [one.detach().clone() for one in buffers]
        has_changed = [False] * len(buffers)
        sums: list[tuple[_Node, _Tensors]] = []
        _drop_gradients(parameters)
        try:
            for one in self.mine:
                with _seeded(_STEP, self.seed, step, one):
                    yield one
                found = [_copied(buffer, old) for buffer, old in zip(buffers, before, strict=True)]
                has_changed = [has or new is not None for has, new in zip(has_changed, found, strict=True)]
                gradients = [self._gradient(parameter) for parameter in parameters]
                _add(
                    sums,
                    one,
                    gradients
                    + [old.clone() if new is None else new for new, old in zip(found, before, strict=True)],
                )
                _drop_gradients(parameters)
        except GeneratorExit:
            _drop_gradients(parameters)
            raise
        there = [
            any(tensors[i] is not None for _, tensors in sums) for i in range(len(parameters))
        ] + has_changed
        means = self._means(sums, [*parameters, *buffers], there, step)
        for parameter, mean in zip(parameters, means, strict=False):
            parameter.grad = mean
        for buffer, mean in zip(buffers, means[len(parameters) :], strict=True):
            if mean is not None:
                buffer.detach().copy_(mean)

    def loader(self, dataset: Any, batch_size: int, shuffle: bool = True, **options: Any) -> VirtualLoader:
        """Returns a VirtualLoader of `dataset`, which has a length and is indexed; options: those of a DataLoader."""
        return VirtualLoader(self, dataset, batch_size, shuffle, options)

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        found = parameter.grad
        if found is not None and found.layout is not torch.strided:
            name = next(name for name, one in self.model.named_parameters() if one is parameter)
            raise ValueError(f"VirtualRanks: the gradient of {name} is sparse; only dense ones are averaged")
        return found

    def _means(
        self, sums: list[tuple[_Node, _Tensors]], models: Sequence[torch.Tensor], there: list[bool], step: int
    ) -> _Tensors:
        """The mean over all virtual ranks of each tensor that is there on any process; the others are None."""
        if size() > 1:
            there = self._agreed(there, step)
        means: _Tensors = [None] * len(models)
        of_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, model in enumerate(models):
            if there[i]:
                of_kind.setdefault((model.dtype, model.device), []).append(i)
        for (dtype, device), kind in of_kind.items():
            parts = {
                node: torch.cat([_or_zeros(tensors[i], models[i]).reshape(-1) for i in kind])
                for node, tensors in sums
            }
            lengths = [models[i].numel() for i in kind]
            flat = self._mean(parts, torch.empty(0, dtype=dtype, device=device), sum(lengths))
            for i, piece in zip(kind, flat.split(lengths), strict=True):
                means[i] = piece.view(models[i].shape)
        return means

    def _agreed(self, there: list[bool], step: int) -> list[bool]:
        told = [self.size, self.seed, step]
        agreed = allreduce(
            torch.tensor([*there, *told, *(-one for one in told)], dtype=torch.int64),
            op=Max,
            name="virtual_ranks.there",
        ).tolist()
        most, least = agreed[-6:-3], [-one for one in agreed[-3:]]
        if most != least:
            raise ValueError(
                f"VirtualRanks: size, seed and step differ between processes: {told} on rank {rank()}, "
                f"from {least} to {most} on all"
            )
        return [bool(one) for one in agreed[:-6]]

    def _mean(self, parts: dict[_Node, torch.Tensor], empty: torch.Tensor, length: int) -> torch.Tensor:
        """parts: this process's nodes of the tree, each `length` elements. Each process adds up one slice of them.

        empty: has their dtype and device.
        """
        processes, me = size(), rank()
        if processes == 1:
            return _divided(_total(parts, self.size), self.size)
        cuts = [length * one // processes for one in range(processes + 1)]
        lengths = [end - start for start, end in itertools.pairwise(cuts)]
        slices = [part[cuts[one] : cuts[one + 1]] for one in range(processes) for part in parts.values()]
        received = alltoall(
            torch.cat([empty, *slices]),
            splits=torch.tensor([len(parts) * one for one in lengths], dtype=torch.int32),
            name=f"virtual_ranks.parts.{empty.dtype}.{empty.device.type}",
        )[0]
        nodes = [node for one in range(processes) for node in _nodes(_share(one, processes, self.size))]
        slice_of = dict(zip(nodes, received.split([lengths[me]] * len(nodes)), strict=True))
        mine = _divided(_total(slice_of, self.size), self.size)
        return allgather(mine, name=f"virtual_ranks.means.{empty.dtype}.{empty.device.type}")


class VirtualLoader:
    """Batches of a data set for virtual ranks, the same for any number of processes; made by VirtualRanks.loader().

    Its length is the number of steps in an epoch: in each, every virtual rank has a batch of its own. Samples that are
    left over are not used in that epoch; a shuffled order is another one in each. Random transforms follow from the
    seed, the step and the virtual rank, also in workers.
    """

    def __init__(
        self, virtual: VirtualRanks, dataset: Any, batch_size: int, shuffle: bool, options: dict[str, Any]
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise TypeError(
                "VirtualLoader: the data set must have a length and be indexed, not only iterated over"
            )
        if batch_size < 1:
            raise ValueError(f"VirtualLoader: batch_size is {batch_size}; it must be at least 1")
        self._virtual, self._batch_size, self._shuffle, self._options = virtual, batch_size, shuffle, options
        self._dataset = _SeededDataset(dataset, virtual.seed)
        self._samples = len(dataset)
        self._next: tuple[int, int] | None = None
        self._batches: Iterator[Any] = iter(())
        if not len(self):
            raise ValueError(
                f"VirtualLoader: {self._samples} samples are less than one batch of {batch_size} for each of "
                f"{virtual.size} virtual ranks"
            )

    def __len__(self) -> int:
        return self._samples // (self._batch_size * self._virtual.size)

    def batch(self, rank: int, step: int) -> Any:
        """Returns the batch of a virtual rank in a step, which is counted over epochs.

        Quick in the order of VirtualRanks.ranks(): batches are loaded ahead. Any other order begins loading anew.
        """
        if (step, rank) != self._next:
            plan: Any = self._plan(rank, step)  # more than lists of indices, as the data set's type says
            # A generator of its own: a new iterator draws a number, which must not come out of the model's.
            loader = DataLoader(
                self._dataset, batch_sampler=plan, generator=torch.Generator(), **self._options
            )
            self._batches = iter(loader)
        mine = self._virtual.mine
        self._next = (step, rank + 1) if rank + 1 in mine else (step + 1, mine.start)
        return next(self._batches)

    def _plan(self, rank: int, step: int) -> Iterator[_Batch]:
        """From here on, in the order in which this process asks."""
        mine = self._virtual.mine
        order, order_of = torch.empty(0), -1
        while True:
            epoch, at = divmod(step, len(self))
            if epoch != order_of:
                order, order_of = self._order(epoch), epoch
            first = (at * self._virtual.size + rank) * self._batch_size
            yield _Batch(order[first : first + self._batch_size].tolist(), step, rank)
            rank, step = (rank + 1, step) if rank + 1 in mine else (mine.start, step + 1)

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(_seed(_ORDER, self._virtual.seed, epoch))
        return torch.randperm(self._samples, generator=generator)


class _Batch(NamedTuple):
    """Of which virtual rank and step, and which samples; a DataLoader gives it to __getitems__() as it is."""

    indices: list[int]
    step: int
    rank: int


class _SeededDataset(torch.utils.data.Dataset[Any]):
    """Random transforms of a batch's samples draw numbers of its own, in a worker and in the process itself."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, batch: _Batch) -> list[Any]:
        with _seeded(_SAMPLES, self.seed, batch.step, batch.rank):
            if hasattr(self.dataset, "__getitems__"):
                return list(self.dataset.__getitems__(batch.indices))
            return [self.dataset[index] for index in batch.indices]


# ---- the tree


def _share(rank: int, processes: int, virtual: int) -> range:
    return range(rank * virtual // processes, (rank + 1) * virtual // processes)


def _nodes(share: range) -> list[_Node]:
    """The largest complete nodes that cover a share of the virtual ranks, in order; what _add() leaves of it."""
    found: list[_Node] = []
    for one in share:
        found.append((0, one))
        while len(found) > 1 and _are_siblings(found[-2], found[-1]):
            found.pop()
            found[-1] = _parent(found[-1])
    return found


def _add(sums: list[tuple[_Node, _Tensors]], one: int, tensors: _Tensors) -> None:
    """Adds the tensors of a virtual rank to those of the ranks before it, as far as the tree is complete there."""
    sums.append(((0, one), tensors))
    while len(sums) > 1 and _are_siblings(sums[-2][0], sums[-1][0]):
        right = sums.pop()[1]
        node, left = sums.pop()
        sums.append((_parent(node), [_sum(a, b) for a, b in zip(left, right, strict=True)]))


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a.add_(b)


def _are_siblings(left: _Node, right: _Node) -> bool:
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


def _parent(node: _Node) -> _Node:
    return node[0] + 1, node[1] // 2


def _total(parts: dict[_Node, torch.Tensor], virtual: int) -> torch.Tensor:
    """The sum over the tree of all virtual ranks, of nodes that cover it."""

    def value(level: int, index: int) -> torch.Tensor | None:
        if index << level >= virtual:
            return None
        if (found := parts.get((level, index))) is not None:
            return found
        left, right = value(level - 1, 2 * index), value(level - 1, 2 * index + 1)
        assert left is not None, "the parts cover all virtual ranks"
        return left if right is None else left + right

    total = value((virtual - 1).bit_length(), 0)
    assert total is not None
    return total


def _divided(total: torch.Tensor, count: int) -> torch.Tensor:
    if total.dtype is torch.bool:
        return total  # true where it is on any virtual rank
    whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, count, rounding_mode="floor" if whole else None)


# ---- tensors and random numbers


def _drop_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    for one in parameters:
        one.grad = None


def _copied(buffer: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """A copy if it has changed, and the buffer is as it was; None: it has not. Equal NaNs are no change."""
    if bool(((buffer == old) | ((buffer != buffer) & (old != old))).all()):
        return None
    copy = buffer.detach().clone()
    buffer.detach().copy_(old)
    return copy


def _or_zeros(found: torch.Tensor | None, model: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(model) if found is None else found


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


@contextlib.contextmanager
def _seeded(*key: int) -> Iterator[None]:
    """Random numbers of torch, NumPy and Python that follow from the key; afterwards as if none had been drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            seed = _seed(*key)
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
