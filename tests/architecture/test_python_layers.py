"""The walls inside horoclone/: which layer may import which, and no circles of modules. Read from the code, not run.

Counted is all that a module names: imports inside functions and those for annotations (TYPE_CHECKING) are arrows like
others. The optional parts, a folder each, are nobody's imports: what is looked up by name, when it is asked for, stands in
BY_NAME. Importing a module also imports the packages around it: their `__init__` counts, but for the packages that the
importing module itself lies in, which are being imported already.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from horoclone import optional

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PACKAGE = ROOT / "horoclone"

# A layer is a module or package below horoclone, with all that no longer name here covers. It may import itself, the
# package horoclone (its version, and nothing else), and the layers that are named.
MAY_IMPORT = {
    layer: set(others.split())
    for layer, others in re.findall(
        r"^([\w.]+):(.*(?:\n .*)*)",
        """
_keras: keras ops process_sets
anonymous_file:
arguments:
arrays: arguments comparison errors handles ops process_sets requests runtime weights
bootstrap: connection_limits errors selection settings
checkpoint: anonymous_file errors failpoints objects owned runtime
checkpoint.jax:
checkpoint.torch:
common: elastic errors ops process_sets runtime runtime.lifecycle
comparison: errors runtime settings
compression:
cupy: arrays errors evaluation objects ops process_sets runtime runtime.lifecycle
data:
elastic: arrays errors failpoints objects optional owned runtime runtime.lifecycle
errors:
evaluation: objects process_sets
failpoints: errors
gradient_names: runtime runtime.lifecycle
handles: arguments errors process_sets
horoclone: optional
horovod_alias: stand_ins
jax: arguments arrays comparison compression elastic errors evaluation gradient_names objects ops optional owned
    process_sets requests runtime runtime.lifecycle tensor_names weights
keras: arguments arrays comparison compression elastic errors evaluation gradient_names jax objects ops optional owned process_sets
    runtime runtime.exported stand_ins tensorflow torch torch.operations tracking
launch: anonymous_file bootstrap connection_limits errors failpoints live membership optional selection settings simulate
    sockets
lightning: bootstrap errors objects runtime runtime.lifecycle torch tracking
live: connection_limits
membership: bootstrap errors failpoints
objects: arguments arrays bootstrap errors process_sets runtime
ops: arguments errors
optional:
owned:
plan: replay
plan.launching: bootstrap launch
plan.torch: replay torch torch.compression torch.optimizer
process_sets: errors ops runtime
ps: arguments bootstrap errors failpoints runtime
ps.torch: arguments
ray: bootstrap errors launch membership ps runner
replay:
requests: arguments ops
runner: bootstrap common launch
runtime: bootstrap connection_limits errors live membership settings
runtime.elastic_sets: membership process_sets
runtime.exit_hooks: bootstrap errors tensor_names
runtime.exported: process_sets runtime.lifecycle
runtime.lifecycle: bootstrap errors failpoints process_sets runtime.elastic_sets runtime.exit_hooks selection
    settings
selection:
settings:
simulate: arguments replay runtime
sockets: arguments runtime
spark: bootstrap connection_limits errors launch runner
spark.keras: keras
spark.torch: torch
stand_ins: errors
tensor_names: errors
tensorflow: arguments arrays bootstrap common comparison compression elastic errors evaluation gradient_names objects ops
    optional owned process_sets runtime runtime.exported runtime.lifecycle tensor_names weights
tensorflow.keras: common keras ops process_sets runtime runtime.exported
torch: common errors evaluation ops optional runtime runtime.exported runtime.lifecycle torch.c10d torch.compression
    torch.elastic torch.functions torch.local_sgd torch.mpi_ops torch.operations torch.optimizer
    torch.sync_batch_norm torch.virtual_ranks
torch.c10d: anonymous_file bootstrap errors handles objects ops runtime runtime.lifecycle settings torch.operations
torch.compression: compression ops torch.compressor torch.compressors
torch.compressor: compression errors
torch.compressors: runtime torch.compressor
torch.elastic: elastic errors objects owned runtime torch.functions torch.operations torch.optimizer
torch.functions: arguments objects process_sets runtime torch.operations
torch.local_sgd: ops process_sets runtime torch.compression torch.compressor torch.operations torch.optimizer
torch.mpi_ops: common errors ops runtime runtime.exported torch.operations
torch.operations: arguments errors handles ops process_sets requests runtime torch.compression weights
torch.optimizer: arguments arrays comparison errors gradient_names objects ops process_sets runtime stand_ins torch.compression
    torch.compressor torch.functions torch.operations weights
torch.sync_batch_norm: errors ops process_sets torch.operations
torch.torchft: torch.c10d
torch.virtual_ranks: comparison errors ops runtime runtime.exported torch.mpi_ops torch.optimizer
tracking: runtime
weights: arguments errors ops
connection_limits:
""",
        re.MULTILINE,
    )
}

# (module, what it looks up by name) -> why it cannot import it
BY_NAME: dict[tuple[str, str], str] = {
    ("horoclone", "checkpoint"): "hvd.checkpoint, where that part is there",
    ("torch", "checkpoint"): "the same",
    ("tensorflow", "checkpoint"): "the same",
    ("keras", "checkpoint"): "the same",
    ("jax", "checkpoint"): "the same",
    ("torch", "ps.torch"): "from horoclone.torch import ps",
    ("elastic.disk", "checkpoint"): "state.checkpoint() saves by it",
    ("launch.tool", "plan.launching"): "a subcommand of `horoclone`",
    ("launch.views", "live.dashboard.content"): "--dashboard",
    ("launch.views", "live.dashboard.server"): "--dashboard",
    ("keras.reduction", "keras.on_tensorflow"): "the module of its backend, as on_jax and on_torch are",
    ("tensorflow.optimizer", "tensorflow.keras"): "it takes Keras's optimizers, whose binding is above it",
}
# (module, part) -> what its names are for: type checkers follow no lookup by name
SHOWN_TO_TYPE_CHECKERS: dict[tuple[str, str], str] = {
    (binding, "checkpoint"): "hvd.checkpoint" for binding in ("torch", "tensorflow", "keras", "jax")
}

# module -> the native calls that it makes; nobody else builds a request to the core
WHO_BUILDS_REQUESTS: dict[str, set[str]] = {
    "requests": {"submit", "submit_group", "run"},
    "process_sets": {"run"},  # the ranks agree on a set below everything that knows arrays
    "torch.optimizer.reducer": {"declare", "submit_declared"},  # an optimizer's buckets
    # passes on what others have built, or refuses it
    "runtime.joining_rank": {"declare", "submit", "submit_declared", "submit_group"},
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name without `horoclone.`; the package itself is "horoclone"."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "horoclone"] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def named_in(statement: ast.Import | ast.ImportFrom, package: tuple[str, ...]) -> Iterator[str]:
    """The modules of ours that an import statement names; `from package import name` may name a module or a value."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        base = package[: len(package) - statement.level + 1] if statement.level else ()
        whole = ".".join((*base, *([statement.module] if statement.module else [])))
        names = [f"{whole}.{alias.name}" for alias in statement.names]
        names = [name if name.removeprefix("horoclone.") in modules() else whole for name in names]
    for name in names:
        if name == "horoclone" or name.startswith("horoclone."):
            short = name.removeprefix("horoclone.")
            assert short in modules() or short.startswith("_core"), f"{name} is imported and does not exist"
            if short in modules():
                yield short


def around(module: str) -> list[str]:
    """The packages that a module lies in, from the outside."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@cache
def imports_of(module: str) -> frozenset[str]:
    path = modules()[module]
    package = ("horoclone", *path.relative_to(PACKAGE).parts[:-1])
    found: set[str] = set()
    for statement in import_statements(tree_of(module)):
        for name in named_in(statement, package):
            if (module, name) not in SHOWN_TO_TYPE_CHECKERS:
                found |= {name, *(outer for outer in around(name) if outer not in around(module))}
    return frozenset(found - {module})


def layer_of(module: str) -> str:
    return max((layer for layer in (module, *around(module)) if layer in MAY_IMPORT), key=len, default=module)


def circles(graph: dict[str, frozenset[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        path.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in path:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = path.index(node)
            if len(path) - start > 1:
                found.append(set(path[start:]))
            del path[start:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_module_needs_itself_through_others() -> None:
    assert {"runtime", "runtime.current", "torch"} <= set(modules())
    found = circles({module: imports_of(module) for module in modules()})
    assert not found, f"modules that import each other: {[sorted(circle) for circle in found]}"


def test_a_layer_imports_only_what_the_table_names() -> None:
    used: dict[str, set[str]] = {layer: set() for layer in MAY_IMPORT}
    wrong = []
    for module in modules():
        layer = layer_of(module)
        assert layer in MAY_IMPORT, (
            f"{module} is in no layer: add it to MAY_IMPORT and to docs/architecture.md"
        )
        others = {layer_of(other): other for other in imports_of(module) if other != "horoclone"}
        for other, name in others.items():
            if other == layer or other in around(layer):
                continue
            used[layer].add(other)
            if other not in MAY_IMPORT[layer]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, wrong
    idle = {
        layer: sorted(MAY_IMPORT[layer] - used[layer])
        for layer in MAY_IMPORT
        if MAY_IMPORT[layer] - used[layer]
    }
    assert not idle, f"the table allows what nobody does: {idle}"


def test_no_room_needs_itself_through_others() -> None:
    found = circles({layer: frozenset(others) for layer, others in MAY_IMPORT.items()})
    assert not found, f"layers that import each other: {found}"


def part_of(module: str) -> str | None:
    return next((part for part in optional.PARTS if module == part or module.startswith(f"{part}.")), None)


def test_nothing_imports_an_optional_part() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in modules()
        for other in imports_of(module)
        if part_of(module) is None and part_of(other) is not None
    ]
    assert not wrong, f"ask horoclone.optional for it, by name: {wrong}"


def test_what_type_checkers_are_shown_is_loaded_by_nobody() -> None:
    for (module, name), why in SHOWN_TO_TYPE_CHECKERS.items():
        tree = tree_of(module)
        shown = [
            found
            for node in tree.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for statement in node.body
            if isinstance(statement, ast.ImportFrom)
            for found in named_in(statement, ("horoclone", module))
        ]
        assert why and name in shown, f"{module} shows {shown}"
        everywhere = [n for s in import_statements(tree) for n in named_in(s, ("horoclone", module))]
        assert everywhere.count(name) == 1, f"{module} imports {name} outside of TYPE_CHECKING"


def names_looked_up(module: str) -> set[str]:
    """What a module loads by a name of ours that stands in it."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, given = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            if called == "optional.load" and given.startswith("'"):
                found.add(given.strip("'"))
            elif called == "optional.offers":
                found.update(ast.literal_eval(one.value) for one in node.keywords)
            elif called == "importlib.import_module" and given.startswith("'horoclone."):
                found.add(given.strip("'").removeprefix("horoclone."))
    return found


def test_what_is_looked_up_by_name_has_a_reason() -> None:
    found = {
        (module, name) for module in modules() for name in names_looked_up(module) if part_of(module) is None
    }
    assert found == set(BY_NAME)
    assert {name for _, name in BY_NAME} <= set(modules())


def native_calls_of(module: str) -> set[str]:
    """Which of the native runtime's methods for operations a module takes, under whatever name the runtime has there."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute):
            method, owner = node.attr, ast.unparse(node.value)
            kind = owner.removesuffix("()").split(".")[-1].strip("_")
            if (
                method in ("submit_group", "submit_declared", "declare", "submit")
                and kind != "requests"
                and not owner.endswith("pool")  # of threads
            ) or (method == "run" and kind in ("native", "runtime", "core")):
                found.add(method)
    return found


def test_a_request_to_the_core_is_built_in_one_place() -> None:
    found = {module: native_calls_of(module) for module in modules()}
    assert {module: calls for module, calls in found.items() if calls} == WHO_BUILDS_REQUESTS


def test_nobody_looks_at_the_frame_of_a_caller() -> None:
    """What a call does must not depend on who makes it; current.py names the call that came before init(),
    phase_sampler.py tells where the time goes, which nothing depends on, and exit_hooks.py asks whether anybody has
    caught an exception."""
    looks = re.compile(r"\b(_getframe|currentframe|f_back|getouterframes|inspect\.stack)\b")
    assert {module for module, path in modules().items() if looks.search(path.read_text())} == {
        "runtime.current",
        "runtime.exit_hooks",
        "runtime.phase_sampler",
    }
