"""Makes ranks start alike: copies variables and Python objects from one rank to all, also in functions and TF1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoclone import objects
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.tensorflow.mpi_ops import _as_it_is, _is_resource, broadcast_, native_of


@_as_it_is
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives the variables rank root_rank's values. In a graph returns the op that does it; eagerly it is done.

    variables: tf.Variables of either kind or Keras variables, the same number, shapes and dtypes on every rank (any
    numeric dtype). `inplace` is accepted and changes nothing: the values are always received beside the variables.
    """
    plain = [native_of(variable) for variable in variables]
    updates = []
    for kind in (True, False):
        group = [variable for variable in plain if _is_resource(variable) == kind]
        if group:
            updates += broadcast_(group, root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*updates)


def _make_broadcast_group_fn() -> Callable[..., Any]:
    """broadcast_variables, under the private name by which libraries take it from Horovod."""
    return broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the op that gives all global variables of the default graph rank root_rank's values.

    RuntimeError when TensorFlow runs eagerly, where there is no such list.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables from rank root_rank after a session was made, so that ranks start alike."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph, once for each graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast in the new session."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of rank root_rank on every rank, through cloudpickle. `session` is accepted and not needed."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns broadcast_object with everything but the object fixed."""
    return objects.broadcast_object_fn(root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the list of every rank's object, in rank order, through cloudpickle. `session` is accepted and not
    needed."""
    return objects.allgather_object(obj, name, process_set)
