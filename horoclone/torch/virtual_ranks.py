"""Training whose results do not depend on how many processes there are (EasyScale, Li et al., SC'23)."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from horoclone import comparison
from horoclone.errors import Mismatch
from horoclone.ops import Max
from horoclone.runtime import native
from horoclone.runtime.exported import rank, size
from horoclone.torch.mpi_ops import allgather, allreduce, alltoall
from horoclone.torch.optimizer.wrapping import is_wrapped_for

__all__ = ["VirtualLoader", "VirtualRanks"]

# A node of the tree in which values of virtual ranks are added: at level k, node i has those of i * 2^k and the 2^k - 1
# after it.
_Node = tuple[int, int]
_Tensors = list["torch.Tensor | None"]  # gradients, then buffers

# What random numbers are for: parts of the key from which they follow.
_STEP, _SAMPLES, _ORDER, _COLLATING = 1, 2, 3, 4


MODELS_DIFFER = (
    "VirtualRanks: before step {step} the processes' models are not the same: other parameters or buffers, other "
    "values, or others that are trained. Build the same model on every process, and give all the same values before "
    "the first loop: hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
)


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
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"VirtualRanks: model is a {type(model).__name__}; it must be a torch.nn.Module")
        size, seed = operator.index(size), operator.index(seed)
        if size < 1:
            raise ValueError(f"VirtualRanks: size is {size}; it must be at least 1")
        if seed < 0:
            raise ValueError(f"VirtualRanks: seed is {seed}; it must be 0 or more")
        self.model, self.size, self.seed = model, size, seed
        self._compared_in: Any = None  # the runtime in which the processes' models were compared

    @property
    def mine(self) -> range:
        """The virtual ranks that this process runs now."""
        return _share(rank(), size(), self.size)

    def ranks(self, step: int) -> Iterator[int]:
        """Gives this process's virtual ranks; when the loop over them has ended, gradients and buffers are the means.

        step: the number of the training step, from which random numbers follow; the same on all processes. Each virtual
        rank finds no gradients, and buffers as the step found them. After a loop that was left early there are no
        gradients, and buffers are as the step found them. Parameters without a gradient on all virtual ranks have none
        afterwards. ValueError where size, seed or step differ between processes, a gradient is sparse, or a
        DistributedOptimizer has parameters of the model; Mismatch where the models differ, which is looked at in the
        first loop; RuntimeError where nothing was computed in the loop.
        """
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        if is_wrapped_for(parameters):
            raise ValueError(
                "VirtualRanks: an hvd.DistributedOptimizer has parameters of this model and would reduce their "
                "gradients as well: use torch's own optimizer, and drop the other one"
            )
        buffers = _Buffers(self.model)
        check = self._check_of_model()
        has_changed = [False] * len(buffers.tensors)
        sums: list[tuple[_Node, _Tensors]] = []
        _drop_gradients(parameters)
        try:
            for one in self.mine:
                with _seeded(_STEP, self.seed, step, one):
                    yield one
                found = buffers.taken()
                has_changed = [has or new is not None for has, new in zip(has_changed, found, strict=True)]
                gradients = [self._gradient(parameter) for parameter in parameters]
                changed = [
                    _widened(old, copies=True) if new is None else _widened(new)
                    for new, old in zip(found, buffers.before, strict=True)
                ]
                _add(sums, one, [*map(_widened, gradients), *changed])
                _drop_gradients(parameters)
        except BaseException:
            _drop_gradients(parameters)
            buffers.restore()
            raise
        there = [
            any(tensors[i] is not None for _, tensors in sums) for i in range(len(parameters))
        ] + has_changed
        if size() > 1:
            there = self._agreed(there, step, check)
        if parameters and not any(there):
            raise RuntimeError(
                f"VirtualRanks: in step {step} no virtual rank has computed a gradient or changed a buffer. Call "
                f"backward() within the loop over ranks({step}), and take its numbers one by one, not as a list"
            )
        means = self._means(sums, [*parameters, *buffers.tensors], there)
        for parameter, mean in zip(parameters, means, strict=False):
            parameter.grad = mean
        for buffer, mean in zip(buffers.tensors, means[len(parameters) :], strict=True):
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
        self, sums: list[tuple[_Node, _Tensors]], models: Sequence[torch.Tensor], there: list[bool]
    ) -> _Tensors:
        """The mean over all virtual ranks of each tensor that is there on any process; the others are None."""
        means: _Tensors = [None] * len(models)
        of_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, model in enumerate(models):
            if there[i]:
                of_kind.setdefault((_wide(model.dtype), model.device), []).append(i)
        for (dtype, device), kind in of_kind.items():
            parts = {
                node: torch.cat([_or_zeros(tensors[i], models[i]).reshape(-1) for i in kind])
                for node, tensors in sums
            }
            lengths = [models[i].numel() for i in kind]
            flat = self._mean(parts, torch.empty(0, dtype=dtype, device=device), sum(lengths))
            for i, piece in zip(kind, flat.split(lengths), strict=True):
                means[i] = piece.view(models[i].shape).to(models[i].dtype)
        return means

    def _check_of_model(self) -> int | None:
        """Of the form and content of this process's model, in the first loop of a world."""
        if size() == 1 or self._compared_in is native():
            return None
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        form = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in named]
        here = [one.detach() for _, one in named if one.device.type == "cpu" and one.layout is torch.strided]
        flat = [one.resolve_conj().resolve_neg().contiguous() for one in here]
        hashes = comparison.hashes([one.data_ptr() for one in flat], [one.nbytes for one in flat])
        return comparison.joined([zlib.crc32(repr(form).encode()), *hashes])

    def _agreed(self, there: list[bool], step: int, check: int | None) -> list[bool]:
        told = [self.size, self.seed, step, len(there)]
        checks = [-1, -(1 << 40)] if check is None else [check, -check]
        limits = allreduce(
            torch.tensor([*told, *(-one for one in told), *checks], dtype=torch.int64, device="cpu"),
            op=Max,
            name="virtual_ranks.limits",
        ).tolist()
        most, least = limits[:3], [-one for one in limits[4:7]]
        if most != least:
            raise ValueError(
                f"VirtualRanks: size, seed and step differ between processes: {told[:3]} on rank {rank()}, "
                f"from {least} to {most} on all"
            )
        if limits[3] != -limits[7] or limits[8] > -limits[9]:
            raise Mismatch(MODELS_DIFFER.format(step=step))
        self._compared_in = native()
        agreed = allreduce(
            torch.tensor(there, dtype=torch.uint8, device="cpu"), op=Max, name="virtual_ranks.there"
        )
        return [bool(one) for one in agreed.tolist()]

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
            splits=torch.tensor([len(parts) * one for one in lengths], dtype=torch.int32, device="cpu"),
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
        self._virtual, self._options = virtual, options
        self._dataset = _SeededDataset(dataset, virtual.seed)
        self._plan = _Plan(len(dataset), batch_size, virtual.size, shuffle, virtual.seed)
        collate = options.get("collate_fn")
        if collate is not None:
            self._options = {**options, "collate_fn": _SeededCollating(collate, virtual.seed)}
        self._next: tuple[int, int, range] | None = None  # step, rank, and the share of which that is planned
        self._batches: Iterator[Any] = iter(())
        if not len(self):
            raise ValueError(
                f"VirtualLoader: {len(dataset)} samples are less than one batch of {batch_size} for each of "
                f"{virtual.size} virtual ranks"
            )

    def __len__(self) -> int:
        return self._plan.steps()

    def batch(self, rank: int, step: int) -> Any:
        """Returns the batch of a virtual rank in a step, which is counted over epochs.

        Quick in the order of VirtualRanks.ranks(): batches are loaded ahead. Any other order begins loading anew.
        ValueError for what is no virtual rank or step.
        """
        if not 0 <= rank < self._virtual.size or step < 0:
            raise ValueError(
                f"VirtualLoader: there is no virtual rank {rank} of {self._virtual.size}, or no step {step}; "
                "it is batch(rank, step)"
            )
        mine = self._virtual.mine
        if (step, rank, mine) != self._next:
            # More than lists of indices, as the data set's type says.
            plan: Any = self._plan.batches(mine, rank, step)
            # A generator of its own: a new iterator draws a number, which must not come out of the model's.
            loader = DataLoader(
                self._dataset, batch_sampler=plan, generator=torch.Generator(), **self._options
            )
            self._batches = iter(loader)
        self._next = (step, rank + 1, mine) if rank + 1 in mine else (step + 1, mine.start, mine)
        return next(self._batches)


class _Plan(NamedTuple):
    """Which samples are whose.

    It does not hold the loader: in a circle the queues that tell workers of the end would be gone before that.
    """

    samples: int
    batch_size: int
    virtual_size: int
    shuffle: bool
    seed: int

    def steps(self) -> int:
        return self.samples // (self.batch_size * self.virtual_size)

    def batches(self, mine: range, rank: int, step: int) -> Iterator[_Batch]:
        """From here on, in the order in which a process with this share asks."""
        order, order_of = torch.empty(0), -1
        while True:
            epoch, at = divmod(step, self.steps())
            if epoch != order_of:
                order, order_of = self.order(epoch), epoch
            first = (at * self.virtual_size + rank) * self.batch_size
            yield _Batch(order[first : first + self.batch_size].tolist(), step, rank)
            rank, step = (rank + 1, step) if rank + 1 in mine else (mine.start, step + 1)

    def order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.samples, device="cpu")
        generator = torch.Generator().manual_seed(_seed(_ORDER, self.seed, epoch))
        return torch.randperm(self.samples, generator=generator, device="cpu")


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
                return _Samples(batch, self.dataset.__getitems__(batch.indices))
            return _Samples(batch, [self.dataset[index] for index in batch.indices])


class _Samples(list[Any]):
    """Of a batch."""

    def __init__(self, batch: _Batch, samples: Sequence[Any]) -> None:
        super().__init__(samples)
        self.batch = batch


class _SeededCollating:
    """Draws numbers of its own, too (MixUp, random crops of a whole batch)."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.collate, self.seed = collate, seed

    def __call__(self, samples: _Samples) -> Any:
        with _seeded(_COLLATING, self.seed, samples.batch.step, samples.batch.rank):
            return self.collate(samples)


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


class _Buffers:
    """A model's buffers as a step finds them, and where they are held: a forward may put another tensor there."""

    def __init__(self, model: torch.nn.Module) -> None:
        places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        self.tensors: list[torch.Tensor] = []
        self._model, self._names = model, list[str]()
        for prefix, module in model.named_modules():
            for name, one in module._buffers.items():
                if one is not None:
                    if id(one) not in places:
                        self.tensors.append(one)
                        self._names.append(f"{prefix}.{name}" if prefix else name)
                    places.setdefault(id(one), []).append((module, name))
        self._places = [places[id(one)] for one in self.tensors]
        self.before = [one.detach().clone() for one in self.tensors]

    def taken(self) -> _Tensors:
        """Copies of those that have changed, None for the others; afterwards all are as they were. ValueError for
        buffers that are new, or have become another kind of tensor."""
        found: _Tensors = []
        for name, tensor, before, places in zip(
            self._names, self.tensors, self.before, self._places, strict=True
        ):
            now = [module._buffers.get(place) for module, place in places]
            other = next((one for one in now if one is not tensor), tensor)
            if other is None or other.shape != before.shape or other.dtype != before.dtype:
                is_now = None if other is None else (list(other.shape), other.dtype)
                raise ValueError(
                    f"VirtualRanks: in the loop the buffer {name} has become {is_now}, and was "
                    f"{(list(before.shape), before.dtype)}: there is no mean of that"
                )
            found.append(None if _are_same(other, before) else other.detach().clone())
        own = {id(one) for one in self.tensors}
        held = [place for places in self._places for place in places]
        for prefix, module in self._model.named_modules():
            for name, one in module._buffers.items():
                if (
                    one is not None
                    and id(one) not in own
                    and not any(m is module and n == name for m, n in held)
                ):
                    raise ValueError(
                        f"VirtualRanks: the buffer {name} of {prefix or 'the model'} was made in the loop, so that not "
                        "all processes need have it: run the model once before the first loop"
                    )
        self.restore()
        return found

    def restore(self) -> None:
        """All are as they were before the step."""
        for tensor, before, places in zip(self.tensors, self.before, self._places, strict=True):
            for module, name in places:
                module._buffers[name] = tensor
            tensor.detach().copy_(before)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal NaNs are the same."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums cannot overflow where the mean does not."""
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    return dtype if dtype.is_complex or dtype is torch.bool else torch.int64


def _widened(found: torch.Tensor | None, copies: bool = False) -> torch.Tensor | None:
    return None if found is None else found.detach().to(_wide(found.dtype), copy=copies)


def _or_zeros(found: torch.Tensor | None, model: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(model, dtype=_wide(model.dtype)) if found is None else found


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
