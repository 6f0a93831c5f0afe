"""The nodes of the Ray cluster: their names, what they can hold, which of them are about to go. Thread: any."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import ray.exceptions

ANSWER_S = 0.3  # a raylet that lives takes a connection within this

_mutex = threading.Lock()  # guards the names
_names: dict[str, str] = {}  # id of a node -> name, of those that were alive when last looked at


def alive() -> list[Mapping[str, Any]]:
    """ray.nodes() without those that are dead, in Ray's order."""
    return [node for node in ray.nodes() if node.get("Alive", node.get("alive", False))]


def named(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> node. The name is the node's address; of several nodes of one address all but the first have an addition.

    A node keeps its name as long as it lives.
    """
    listed = list(nodes)
    with _mutex:
        ids = {str(node.get("NodeID", node["NodeManagerAddress"])): node for node in listed}
        for gone in set(_names) - set(ids):
            del _names[gone]
        for id_, node in ids.items():
            if id_ not in _names:
                address = str(node["NodeManagerAddress"])
                _names[id_] = address if address not in _names.values() else f"{address}-{id_[:8]}"
        return {_names[id_]: node for id_, node in ids.items()}


def head() -> str:
    """The id of the node without which there is no cluster; empty where Ray does not say."""
    marked = [node for node in alive() if "node:__internal_head__" in node.get("Resources", {})]
    return str(marked[0]["NodeID"]) if marked else ""


def draining() -> set[str]:
    """Ids of nodes that are about to be taken away. Ray has no public call for that."""
    try:
        from ray._private.state import state

        return set(state.get_draining_nodes())
    except (ImportError, AttributeError, ray.exceptions.RaySystemError):
        return set()  # then workers of such a node are lost, and the others go on


def answers(node: Mapping[str, Any]) -> bool:
    """Whether its raylet takes a connection: Ray itself notices the end of a node after some seconds only. True where
    Ray does not say at which port."""
    port = int(node.get("NodeManagerPort", 0))
    if not port:
        return True
    try:
        socket.create_connection((str(node["NodeManagerAddress"]), port), ANSWER_S).close()
    except OSError:
        return False
    return True


def slots(node: Mapping[str, Any], cpus: float, gpus: float) -> int:
    """How many workers with so many CPUs and GPUs the whole node can hold; 0 of either: it does not count."""
    resources = node.get("Resources", {})
    counts = [int(resources.get(name, 0) // need) for name, need in (("CPU", cpus), ("GPU", gpus)) if need]
    return min(counts, default=0)


def free(cpus: float, gpus: float) -> dict[str, int] | None:
    """Id of a node -> how many more workers would start there now; None where Ray cannot say."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return None
    return {
        id_: slots({"Resources": have}, cpus, gpus) for id_, have in available_resources_per_node().items()
    }


def described() -> str:
    """For errors: what each node has, and how much of it is free."""
    try:
        available = ray.available_resources()
    except Exception as error:  # what is said about a failure must not hide it
        return f"the cluster cannot be asked ({error})"
    have = ", ".join(
        f"{name}: {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU"
        for name, node in named(alive()).items()
    )
    return f"nodes: {have or 'none'}; free in all: {available.get('CPU', 0):g} CPU, {available.get('GPU', 0):g} GPU"
