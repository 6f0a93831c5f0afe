"""Reduces one list of gradients over the ranks: which are reduced, in which groups, and what happens to the others.

Dense gradients go out as few grouped operations. In a graph these are cut so that the last layers' gradients, which are
ready first, travel while the others are computed. Sparse ones (tf.IndexedSlices) are gathered, all in one operation.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import tensorflow as tf

from horoclone.comparison import Policy, policy
from horoclone.gradient_names import named_by
from horoclone.ops import Adasum, Average, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set, id_of
from horoclone.tensorflow import mpi_ops
from horoclone.tensorflow.compared import Watch, is_variable, takes_tail
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.mpi_ops import native_of
from horoclone.tensorflow.reductions import SPARSE_WEIGHT, grouped_allreduce

# Large enough that one operation more costs little beside it, small enough that a network has several.
GROUP_BYTES = 8 << 20
KEPT = 8  # comparisons that one variable keeps


def key_of(variable: Any) -> Hashable:
    """What identifies a tf.Variable, a Keras variable or a tensor."""
    inner = getattr(variable, "value", None)
    if not isinstance(variable, tf.Variable) and isinstance(inner, tf.Variable):
        variable = inner  # a variable of Keras 3
    return variable.ref() if hasattr(variable, "ref") else id(variable)


@dataclass
class GradientReduction:
    """What a tape or an optimizer was told about gradients.

    Raises ValueError for options that contradict, ZeroDivisionError for a predivide factor of 0.
    """

    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    local_sources: set[Hashable] = field(default_factory=set)
    weight: Any = None  # how much this rank counts in the mean
    own: Policy = field(default_factory=policy)  # of the comparison
    compares: bool = True  # the ranks' variables, which are the same when gradients are reduced

    def __post_init__(self) -> None:
        resolve_reduce(None, self.op)
        if self.op == Adasum and self.process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.gradient_predivide_factor == 0:
            raise ZeroDivisionError("gradient_predivide_factor must not be 0")
        if self.num_groups:
            text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
            warnings.warn(text, DeprecationWarning, stacklevel=4)
            self.groups = self.num_groups if self.groups is None else self.groups
        self._check_groups()
        if self.weight is not None and (self.op != Average or self.gradient_predivide_factor != 1.0):
            raise ValueError("weight= works with op=hvd.Average and without gradient_predivide_factor")

    def _check_groups(self) -> None:
        if self.groups is None or (isinstance(self.groups, int) and self.groups >= 0):
            return
        lists = isinstance(self.groups, list) and all(
            isinstance(group, (list, tuple)) for group in self.groups
        )
        if not lists:
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
        members = [key_of(variable) for group in self.groups for variable in group]  # type: ignore[union-attr]
        if len(set(members)) != len(members):
            raise ValueError("A variable can only appear once in groups.")

    def register_local(self, sources: Iterable[Any]) -> None:
        """Their gradients stay this rank's own."""
        self.local_sources |= {key_of(source) for source in sources}

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any], name: str) -> list[Any]:
        """The gradients to apply: reduced, None where there is none, local ones divided by the size if so asked.

        gradients: one for each source (a tf.Tensor, a tf.IndexedSlices or None). name: of the operations, in a graph.
        A rank outside the process set gets its own back, as they are.
        """
        result = list(gradients)
        if self.process_set is not global_process_set and not self._included():
            return result
        keys = [key_of(source) for source in sources]
        if self.weight is not None and self.local_sources:
            raise ValueError("weight= does not work together with local layers and sources")
        there = [i for i, gradient in enumerate(result) if gradient is not None]
        for i in there:
            if keys[i] in self.local_sources and self.scale_local_gradients:
                result[i] = self._divided_by_size(result[i])
            elif self.sparse_as_dense and isinstance(result[i], tf.IndexedSlices):
                result[i] = tf.convert_to_tensor(result[i])
        shared = [i for i in there if keys[i] not in self.local_sources]
        sparse = [i for i in shared if isinstance(result[i], tf.IndexedSlices)]
        which = named_by(shared, len(result))
        watch, values = self._watch_of([sources[i] for i in shared], f"{name}{which}")
        looks: list[Any] = []  # at what was compared, when all is under way: it may raise
        with tf.name_scope(name):
            self._reduce_sparse(result, sources, sparse, which)
            for number, places in enumerate(
                self._groups_of([i for i in shared if i not in sparse], result, keys)
            ):
                wires = [result[i] for i in places]
                takes = watch is not None and not looks and takes_tail(wires, self.op)
                sent = [*wires, watch.tail(values, wires[0].dtype)] if takes else wires
                own = _name("HorovodGroupedAllreduce", f"_{number}", which)
                with mpi_ops.naming(own, partial(_names, sources, places)):
                    reduced = grouped_allreduce(
                        sent,
                        device_dense=self.device_dense,
                        compression=self.compression,
                        op=self.op,
                        prescale_factor=1.0 / self.gradient_predivide_factor,
                        postscale_factor=self.gradient_predivide_factor,
                        process_set=self.process_set,
                        weight=self.weight,
                        name=own,
                    )
                if takes:
                    *reduced, received = reduced
                    looks.append((places, received))
                for i, gradient in zip(places, reduced, strict=True):
                    result[i] = gradient
            for places, received in looks:
                checked = watch.look(received, values, [result[i] for i in places])
                for i, gradient in zip(places, checked, strict=True):
                    result[i] = gradient
        return result

    def _watch_of(self, sources: Sequence[Any], name: str) -> tuple[Any, Any]:
        """What compares these variables, and how it gets at them; nothing where a source is none. The first variable
        keeps the last few, as a tape lives for one step."""
        if not self.compares or not sources or not all(is_variable(source) for source in sources):
            return None, None
        variables = [native_of(source) for source in sources]
        kept = vars(variables[0]).setdefault("_horoclone_watches", {})
        key = (name, tuple(self.process_set.ranks or ()), *map(id, variables))
        refs, watch = kept.get(key, ((), None))
        if watch is None or any(ref() is not one for ref, one in zip(refs, variables, strict=True)):
            if len(kept) >= KEPT:
                del kept[next(iter(kept))]
            # Variables of two tapes may be compared at the same time: the name tells them apart.
            forms = zlib.crc32(repr([(tuple(one.shape), one.dtype.name) for one in variables]).encode())
            watch = Watch(self.own, f"{name}.{forms:08x}", self.process_set)
            kept[key] = [weakref.ref(one) for one in variables], watch

        def values() -> list[tuple[str, Any]]:
            return [(f"the weight {getattr(s, 'path', None) or s.name!r}", s) for s in sources]

        return watch, values

    def _included(self) -> bool:
        """Whether this rank is in the process set. Read when a graph is made, as Horovod does; ValueError for a set
        that is not registered."""
        id_of(self.process_set)
        return bool(self.process_set.included())

    def _divided_by_size(self, gradient: Any) -> Any:
        size = mpi_ops.size_op(id_of(self.process_set))
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)

    def _reduce_sparse(
        self, result: list[Any], sources: Sequence[Any], places: Sequence[int], which: str
    ) -> None:
        """Replaces the IndexedSlices at these places by everybody's rows."""
        if not places:
            return
        if self.weight is not None:
            raise NotImplementedError(SPARSE_WEIGHT)
        if self.op == Adasum:
            raise NotImplementedError(
                "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
                "sparse_as_dense=True to DistributedOptimizer"
            )
        if self.op not in (Average, Sum):
            raise NotImplementedError("tf.IndexedSlices can be reduced with op=Average or op=Sum only")
        with tf.device(self.device_sparse):
            parts = [part for i in places for part in (result[i].values, result[i].indices)]
            name = _name("HorovodGroupedAllgather", "", which)
            with mpi_ops.naming(name, partial(_names, sources, places, ("values of ", "indices of "))):
                gathered = mpi_ops.grouped_allgather(parts, name=name, process_set=self.process_set)
            for i, values, indices in zip(places, gathered[::2], gathered[1::2], strict=True):
                whole = tf.IndexedSlices(values, indices, result[i].dense_shape)
                result[i] = self._divided_by_size(whole) if self.op == Average else whole

    def _groups_of(
        self, places: list[int], gradients: Sequence[Any], keys: Sequence[Hashable]
    ) -> list[list[int]]:
        """The user's groups, then everything else."""
        if isinstance(self.groups, int) and self.groups > 0 and places:
            count = min(self.groups, len(places))
            cuts = [len(places) * k // count for k in range(count + 1)]
            return [places[a:b] for a, b in pairwise(cuts)]
        lists: list[list[int]] = []
        if self.groups and not isinstance(self.groups, int):
            place_of = {keys[i]: i for i in places}
            for group in self.groups:
                lists.append([place_of[key_of(v)] for v in group if key_of(v) in place_of])
            taken = {i for group in lists for i in group}
            places = [i for i in places if i not in taken]
        lists += [places] if tf.executing_eagerly() else cut_by_bytes(places, gradients)
        return [group for group in lists if group]


def _name(call: str, number: str, which: str) -> str | None:
    """None for an eager call with all gradients: ranks match those by their order."""
    return None if tf.executing_eagerly() and not which else f"{call}{number}{which}"


def _names(sources: Sequence[Any], places: Sequence[int], parts: Sequence[str] = ("",)) -> list[str]:
    """What errors call the gradients at these places, or each part of them."""
    found = []
    for i in places:
        try:
            name = getattr(sources[i], "path", None) or sources[i].name
        except AttributeError:  # a tensor, run eagerly
            name = f"source {i}"
        found += [f"{part}{name}" for part in parts]
    return found


def cut_by_bytes(places: Sequence[int], gradients: Sequence[Any]) -> list[list[int]]:
    """Groups of about GROUP_BYTES, from the last gradient to the first. By static shapes: the same on every rank."""
    groups: list[list[int]] = [[]]
    filled = 0
    for i in reversed(places):
        if filled >= GROUP_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += (gradients[i].shape.num_elements() or 0) * gradients[i].dtype.size
    return groups
