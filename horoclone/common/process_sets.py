"""Under Horovod's name: horoclone.process_sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from horoclone import process_sets
from horoclone.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


@contextmanager
def _temp_process_set_object(process_set_id: int) -> Iterator[ProcessSet]:
    """The registered set with that id, for a block. A private name that scripts know. ValueError for no such id."""
    found = process_sets._registered.get(process_set_id)
    if found is None:
        raise ValueError(
            f"A process set with id {process_set_id} does not exist, or has not been registered."
        )
    yield found
