"""A state of variables that can be read and written as NumPy arrays: what TensorFlow, Keras and JAX build theirs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from horoclone import arrays, runtime
from horoclone.arrays.handles import synchronize
from horoclone.elastic.alike import check_alike
from horoclone.elastic.attributes import Named
from horoclone.elastic.replicas import is_provisional
from horoclone.elastic.state import ObjectState, root_of_sync
from horoclone.objects import broadcast_object
from horoclone.runtime import steps

_P = ParamSpec("_P")
_T = TypeVar("_T")


class VariablesState(ObjectState):
    """Variables beside attributes. A subclass says which variables there are, and how one is read and written."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=runtime.rank, **kwargs)
        if is_provisional():
            self._saved_values = self._read(self._variables())
        else:
            self._save_values()
        self._slots = {0: self._content()}

    def _variables(self) -> Sequence[Any]:
        """In the same order on every rank."""
        raise NotImplementedError

    def _fixed(self) -> Named:
        yield from super()._fixed()
        own = vars(self)
        yield from ((name, own[name]) for name in ("model", "optimizer") if own.get(name) is not None)
        yield from ((f"variable {place}", one) for place, one in enumerate(own.get("variables") or ()))

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        """Their values as arrays, of any dtype."""
        raise NotImplementedError

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Gives the variables these values."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the newest copy."""
        self._restore_values(self._saved_values)
        super().restore()

    def _restore_values(self, saved: list[Any]) -> None:
        variables = self._variables()
        # A variable that did not exist at the commit keeps its value; the optimizer's come with its first step.
        self._write(variables[: len(saved)], saved[: len(variables)])

    def sync(self) -> None:
        """Gives every rank what the rank with the newest commit has now, and saves it. A collective of all ranks.

        ValueError, on every rank, when the variables differ in number, shape or dtype.
        """
        steps.restart()
        variables, root = self._variables(), root_of_sync()
        values = self._values_of(variables)
        check_alike(self._forms_of(values), root, "variables")
        handles = [
            arrays.broadcast_async_(value.reshape(-1).view(np.uint8), root, f"hvd.elastic.variable.{place}")
            for place, value in enumerate(values)
            if value.size
        ]
        for handle in handles:
            synchronize(handle)
        if runtime.rank() != root:
            self._write(variables, values)
        super().sync()

    def _names_of(self, values: Sequence[Any]) -> list[str]:
        """What each of a copy's values is called in a save, alike on all ranks: its place, where there is no more."""
        return [str(place) for place in range(len(values))]

    def _forms_of(self, values: Sequence[Any]) -> list[Any]:
        return [(str(one.dtype), one.shape) for one in map(np.asarray, values)]

    def _values_of(self, variables: Sequence[Any]) -> list[Any]:
        return [np.array(value, order="C") for value in self._read(variables)]

    def _save_values(self) -> None:
        self._saved_values = self._values_of(self._variables())

    def _save(self) -> None:
        self._save_values()
        super()._save()

    def _on_disk(self) -> dict[str, Any]:
        values = zip(self._names_of(self._saved_values), self._saved_values, strict=True)
        return {**super()._on_disk(), "variables": dict(values)}

    def _take_from_disk(self, found: dict[str, Any]) -> None:
        super()._take_from_disk(found)
        names = self._names_of(self._saved_values)
        values = [found["variables"][name] for name in names]
        for name, mine, theirs in zip(names, self._saved_values, values, strict=True):
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                raise ValueError(
                    f"variable {name} is {theirs.dtype}{list(theirs.shape)} in the save and "
                    f"{mine.dtype}{list(mine.shape)} in this state"
                )
        self._saved_values = values

    def _content(self) -> Any:
        return super()._content(), getattr(self, "_saved_values", [])

    def _accepts(self, content: Any) -> bool:
        plain, values = content
        own = self._read(self._variables())
        return super()._accepts(plain) and self._forms_of(values) == self._forms_of(own)

    def _set_content(self, content: Any) -> None:
        plain, self._saved_values = content
        super()._set_content(plain)


def converting(func: Callable[_P, _T], find: Callable[[Exception], BaseException | None]) -> Callable[_P, _T]:
    """func, of whose exceptions those in which find() sees another are raised as that one."""

    def converted(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            found = find(error)
            if found is None:
                raise
            raise found from error

    return converted
