"""The walls of docs/architecture.md: who may include and import whom, what loads when, names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from world import run_python

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "horoclone"

# A layer may include itself and the layers named here; `door` is include/horoclone.h, `dtypes` the list of element types.
MAY_INCLUDE = {
    "base": {"base", "dtypes"},
    "net": {"net", "base"},
    "device": {"device", "base"},
    "arithmetic": {"arithmetic", "base"},
    "collective": {"collective", "arithmetic", "net", "device", "base"},
    "agreement": {"agreement", "base"},
    "engine": {"engine", "agreement", "collective", "arithmetic", "net", "device", "base"},
    "server": {"server", "arithmetic", "net", "base"},
    "tools": {"tools", "agreement", "collective", "arithmetic", "net", "device", "base", "c_api.h", "door"},
    "c_api.h": {"base", "door"},
    "api.cc": {"engine", "base", "c_api.h", "door"},
    "server_api.cc": {"server", "base", "c_api.h", "door"},
    "operator_new.cc": set(),
    "python": {"python", "tools/python", "door"},
    "tools/python": {"tools/python", "python", "door"},
    "frameworks": {"frameworks", "door"},
    "include": {"door", "dtypes"},  # the other headers add to horoclone.h
}
# Inside a layer, the levels from below: a folder may include itself and the folders of lower levels. "." is what lies in
# the layer's own folder, without the files that a level names.
LEVELS = {
    "collective": (".", "shared", "channels", "gpu", "host.cc"),
    "engine": (
        "rank_metrics", "operation threads context.h iteration.h", "record control tune", "intake", "watch",
        "sets point_to_point", "gpu progress", "."
    ),
}  # fmt: skip
# "file -> folder" of includes that point upwards inside a layer, with the reason. None may be added.
UPWARDS = {
    "collective/selection.cc -> shared": "limits of shared memory, which belong below",
}
FRAMEWORKS = {
    "torch", "tensorflow", "keras", "jax", "cupy", "flax", "optax", "mxnet", "lightning", "ray", "pyspark"
}  # fmt: skip
# path -> framework that it imports inside a function, and only when it is needed
LAZY_IMPORTS = {  # torchrun's store speaks torch's own protocol
    "bootstrap/launchers.py": {"torch"},
    "ps/register.py": {"torch"},
}
# path -> whose objects it packs
WHO_PICKLES = {
    "elastic/replicas.py": "commits for spares, between processes that have proved the secret of the job",
    "objects.py": "broadcast_object and allgather_object, between authenticated ranks",
    "launch/api.py": "run(fn): the function and its values, between us and our own children",
    "launch/call.py": "run(fn), the child's side",
    "launch/torch_flight.py": "files for torchfrtrace, which unpickles them; only written here",
    "spark/common/serialization.py": "estimators and models in files, which the user loads",
    "spark/keras/packing.py": "what a KerasEstimator is given, on its way to its ranks through Spark",
    "spark/torch/estimator.py": "what a TorchEstimator is given, on its way to its ranks through Spark",
    "spark/torch/training.py": "the same, on a rank",
    "runner/common/util/codec.py": "what a script turns into text, and back",
}
# The names at which Horovod's users look for things; scripts import them, so they stay as they are. No others there.
HOROVODS_NAMES = {
    f"horoclone/common/{n}.py"
    for n in ("__init__", "basics", "elastic", "exceptions", "process_sets", "util")
} | {"horoclone/tensorflow/util.py"}
HOROVODS_NAMES |= {"horoclone/ray/utils.py"}
HOROVODS_NAMES |= {
    f"horoclone/spark/common/{n}.py"
    for n in ("__init__", "backend", "estimator", "params", "serialization", "store", "util")
}
HOROVODS_NAMES |= {p.relative_to(ROOT).as_posix() for p in (PACKAGE / "runner").rglob("*.py")}
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|impl|misc)(_|$)", re.IGNORECASE)


def native_sources() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cc", ".cu") and "tests" not in p.parts)


def python_sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(CSRC).parts
    return "tools/python" if parts[:2] == ("tools", "python") else parts[0]


def included_layers(path: Path) -> Iterator[tuple[str, str]]:
    """(layer, text of the include) for every include of our own."""
    for text in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
        if text == "horoclone_dtypes.h":
            yield "dtypes", text
        elif Path(text).name in ("horoclone.h", "horoclone_tools.h", "horoclone_server.h"):
            yield "door", text
        elif "/" in text:
            yield "tools/python" if text.startswith("tools/python/") else text.split("/", 1)[0], text
        elif (CSRC / text).is_file():
            yield text, text
        else:
            yield layer_of(path), text


def test_the_core_has_sources_in_every_room_that_the_rules_name() -> None:
    found = {layer_of(path) for path in native_sources()}
    assert set(MAY_INCLUDE) - {"c_api.h"} <= found | {"include"}
    assert found <= set(MAY_INCLUDE), (
        "a layer that no rule knows: add it to MAY_INCLUDE and to docs/architecture.md"
    )


def test_includes_point_downwards_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} includes {text}"
        for path in native_sources()
        for layer, text in included_layers(path)
        if layer not in MAY_INCLUDE[layer_of(path)]
    ]
    assert not wrong, wrong


def level_of(layer: str, parts: tuple[str, ...]) -> tuple[str, int]:
    """(folder or named file inside the layer, its level); `parts` of a path below csrc/."""
    names = " ".join(LEVELS[layer]).split()
    folder = parts[1] if len(parts) > 2 or parts[1] in names else "."
    return folder, next(level for level, names in enumerate(LEVELS[layer]) if folder in names.split())


def test_every_folder_inside_a_layer_has_a_level() -> None:
    for layer, levels in LEVELS.items():
        names = set(" ".join(levels).split())
        found = {path.relative_to(CSRC / layer).parts[0] for path in (CSRC / layer).glob("*/*.h")} | {"."}
        assert found == {name for name in names if name == "." or "." not in name}, (
            f"{layer}: keep LEVELS and the folders alike"
        )
        gone = [name for name in names if not (CSRC / layer / name).exists()]
        assert not gone, f"{layer} has no {gone}"


def test_includes_point_downwards_inside_a_layer() -> None:
    upwards = set()
    for layer in LEVELS:
        for path in (path for path in native_sources() if layer_of(path) == layer):
            parts = path.relative_to(CSRC).parts
            folder, level = level_of(layer, parts)
            for _, text in included_layers(path):
                if text.startswith(f"{layer}/"):
                    other, other_level = level_of(layer, Path(text).parts)
                    if other != folder and other_level >= level:
                        upwards.add(f"{'/'.join(parts)} -> {other}")
    assert not upwards - set(UPWARDS), f"these includes point upwards: {sorted(upwards - set(UPWARDS))}"
    stale = sorted(set(UPWARDS) - upwards)
    assert not stale, f"these point upwards no more, take them out of UPWARDS: {stale}"


def test_the_core_includes_no_framework_python_or_mpi() -> None:
    libraries = "Python|pybind11|torch|ATen|tensorflow|xla|mpi|cuda|nccl"
    outside = re.compile(rf'^\s*#\s*include\s*[<"]((?:{libraries})\b[^>"]*)', re.MULTILINE)
    wrong = {
        str(path.relative_to(ROOT)): outside.findall(path.read_text())
        for path in native_sources()
        if layer_of(path) not in ("python", "frameworks", "tools/python") and outside.search(path.read_text())
    }
    assert not wrong, wrong


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Full names of everything that a file imports, at whatever depth; annotations-only imports left out."""
    tree = ast.parse(path.read_text())
    package = ("horoclone", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return frozenset(found)


def first_words(names: Iterable[str]) -> set[str]:
    return {name.split(".", 1)[0] for name in names}


def test_a_framework_is_imported_by_its_own_binding_only() -> None:
    for path in python_sources():
        names, parts = imports_of(path), path.relative_to(PACKAGE).parts
        # Horovod's other names for it
        others = parts[:2] == ("tensorflow", "keras") or parts == ("_keras.py",)
        layer = "keras" if others else parts[0]
        allowed = {layer} & FRAMEWORKS | ({"tensorflow", "jax", "torch"} if layer == "keras" else set())
        allowed |= {"optax"} if layer == "jax" else set()  # the optimizers of JAX's world
        allowed |= {"torch"} if layer == "lightning" else set()
        allowed |= {"pyspark"} if layer == "spark" else set()
        allowed |= {"torch"} if parts[:2] == ("spark", "torch") else set()
        allowed |= {"keras", "tensorflow"} if parts[:2] == ("spark", "keras") else set()
        optional_part = parts[0] in ("checkpoint", "plan", "ps")
        allowed |= {"torch", "jax"} & {Path(part).stem for part in parts[1:]} if optional_part else set()
        name = path.relative_to(PACKAGE).as_posix()
        allowed |= LAZY_IMPORTS.get(name, set())
        assert first_words(names) & FRAMEWORKS <= allowed, f"{path}: only a binding knows its framework"
        bindings = {name.split(".")[1] for name in names if name.startswith("horoclone.")} & FRAMEWORKS
        assert bindings <= allowed, f"{path}: bindings do not know each other, and nobody else knows them"


def test_lazy_imports_are_lazy() -> None:
    for name, frameworks in LAZY_IMPORTS.items():
        tree = ast.parse((PACKAGE / name).read_text())
        at_top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        at_top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not first_words(at_top) & frameworks, f"{name} imports {frameworks} when it is loaded"


def test_launcher_bootstrap_and_errors_need_nothing_native() -> None:
    heavy = ("numpy", "horoclone._core", "horoclone.runtime", "horoclone.ops", "horoclone.arrays")
    for path in python_sources():
        if path.relative_to(PACKAGE).parts[0] in ("launch", "bootstrap", "membership", "errors.py"):
            wrong = {name for name in imports_of(path) if name.startswith(heavy)}
            assert not wrong, f"{path} must work where nothing else does, but it imports {wrong}"


LOADED = """
import json, sys
before = set(sys.modules)
import horoclone
import horoclone.launch.cli
print(json.dumps(sorted(set(sys.modules) - before)))
assert horoclone.launch.cli.main(["-np", "1", "true"]) == 0
print(json.dumps(sorted(sys.modules)))
"""


def test_the_launcher_loads_neither_native_code_nor_numpy_nor_a_framework() -> None:
    done = run_python(LOADED, check=True)
    loaded, after_a_job = map(json.loads, done.stdout.splitlines())
    heavy = {"numpy", "cloudpickle", "mpi4py", "rich", "yaml", "asyncio", *FRAMEWORKS} & first_words(
        after_a_job
    )
    assert not heavy, f"loaded before anything was asked for: {sorted(heavy)}"
    assert "horoclone._core" not in after_a_job and "horoclone.runtime" not in after_a_job
    # What its start costs: some tens of milliseconds (modules are counted, because time depends on the machine).
    assert len(loaded) < 60, f"{len(loaded)} modules: {loaded}"


def test_import_horoclone_alone_loads_only_itself() -> None:
    code = "import sys; b = set(sys.modules); import horoclone; print(*sorted(set(sys.modules) - b))"
    done = run_python(code, check=True)
    ours = [name for name in done.stdout.split() if name.startswith("horoclone")]
    assert ours == ["horoclone"]


def test_no_name_says_nothing() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in [*native_sources(), *python_sources()]
        if any(FORBIDDEN_NAMES.search(part) for part in path.relative_to(ROOT).with_suffix("").parts)
        and path.relative_to(ROOT).as_posix() not in HOROVODS_NAMES
    ]
    assert not wrong, f"name the idea instead: {wrong}"


def test_no_pickle_before_authentication() -> None:
    """Frames are bytes with bounds. Objects travel only when the user calls for it: see WHO_PICKLES."""
    for path in python_sources():
        if path.relative_to(PACKAGE).as_posix() not in WHO_PICKLES:
            names = first_words(imports_of(path))
            assert not names & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}, path


def test_every_test_lies_in_the_folder_of_what_it_tests() -> None:
    assert not list((ROOT / "tests").glob("test_*.py")), "tests/FOLDER mirrors the packages: CONTRIBUTING.md"
