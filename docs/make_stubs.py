"""Writes horoclone/__init__.pyi and horovod-stubs/ from the package: what editors and type checkers see.

`import horoclone` finds everything on first use and `import horovod` is an alias, so that neither can be read from the
source by mypy, pyright or jedi. --check only says whether the files are current.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horoclone
from horoclone import arrays

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "horoclone" / "__init__.pyi"
ALIAS = ROOT / "horovod-stubs"

HEAD = '''"""What `import horoclone as hvd` offers, for editors and type checkers. `make docs` writes this file."""

from collections.abc import Iterable
from typing import Any, overload

from numpy import int32
from numpy.typing import ArrayLike, NDArray

from horoclone.ops import ReduceOp

'''
# Modules that `import horovod.X` finds, by their path below horoclone.
ALIASED = (
    "torch", "torch.elastic", "tensorflow", "tensorflow.elastic", "tensorflow.keras", "tensorflow.keras.callbacks",
    "tensorflow.keras.elastic", "keras", "keras.callbacks", "keras.elastic", "data", "runner", "ray", "ray.adapter",
    "ray.elastic", "ray.elastic_v2", "ray.ray_logger", "ray.runner", "ray.strategy", "ray.utils", "ray.worker", "spark",
    "spark.common", "spark.common.backend", "spark.common.params", "spark.common.store", "spark.common.util",
    "spark.conf", "spark.keras", "spark.runner", "spark.torch",
)  # fmt: skip
# What the results of the operations on NumPy arrays are, where the source says only that they are some kind of array.
RESULTS = {
    "reduce": "NDArray[Any] | None", "reduce_": "NDArray[Any]", "gather": "NDArray[Any] | None",
    "allreduce_": "NDArray[Any]", "broadcast_": "NDArray[Any]", "grouped_allreduce": "list[NDArray[Any]]",
    "grouped_allreduce_": "list[NDArray[Any]]", "grouped_allgather": "list[NDArray[Any]]",
    "grouped_reducescatter": "list[NDArray[Any]]", "synchronize": "Any", "poll": "bool", "barrier": "None",
    "join": "int", "send": "None",
}  # fmt: skip


def is_in_place(name: str) -> bool:
    return name.endswith("_")


def type_of(name: str, parameter: inspect.Parameter) -> str:
    """Of a parameter; what is written into must be an array, all else may be what np.asarray takes."""
    kind = "NDArray[Any]" if is_in_place(name) else "ArrayLike"
    if parameter.name == "array":
        return f"{kind} | None" if parameter.default is None or name.startswith("scatter") else kind
    if parameter.name == "arrays":
        return f"Iterable[{kind}]"
    if parameter.name == "splits":
        return "ArrayLike | None"
    return str(parameter.annotation)


def default_of(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    plain = parameter.default is None or isinstance(parameter.default, (bool, int, float, str))
    return f" = {parameter.default!r}" if plain else " = ..."


def signature_of(name: str, function: Callable[..., Any], result: str, **types: str) -> str:
    """`def name(...) -> result:`, a parameter a line."""
    parts, by_name = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not by_name:
            by_name = True
            parts.append("*")
        kind = types.get(parameter.name, type_of(name, parameter))
        default = "" if types.get(parameter.name) == "ArrayLike" else default_of(parameter)
        parts.append(f"{parameter.name}: {kind}{default}")
    return f"def {name}(" + "".join(f"\n    {part}," for part in parts) + f"\n) -> {result}:"


def result_of(name: str) -> str:
    if name.rstrip("_").endswith("_async") or name in ("isend", "irecv"):
        return "int"
    return RESULTS.get(name, "NDArray[Any]")


def definition(name: str, function: Callable[..., Any]) -> str:
    """A function of the NumPy binding with its docstring, which editors show."""
    doc = textwrap.indent(f'"""{inspect.cleandoc(function.__doc__ or "")}"""', "    ")
    if name == "alltoall":  # with splits the result is a pair
        alone = signature_of(name, function, "NDArray[Any]", splits="None")
        split = signature_of(name, function, "tuple[NDArray[Any], NDArray[int32]]", splits="ArrayLike")
        return f"@overload\n{alone}\n{doc}\n@overload\n{split} ...\n"
    return f"{signature_of(name, function, result_of(name))}\n{doc}\n"


def stub() -> str:
    """The text of horoclone/__init__.pyi."""
    left = set(horoclone.__all__) - set(horoclone._HOMES["arrays"]) - {"__version__"}
    lines = [HEAD]
    for module in ("evaluation", "ops", "runtime.exported"):
        left -= exported(module)
        lines.append(f"from horoclone.{module} import *\n")
    for module, names in horoclone._HOMES.items():
        imports = "".join(f"    {name} as {name},\n" for name in sorted(left.intersection(names)))
        if imports:
            lines.append(f"from horoclone.{module} import (\n{imports})\n")
    lines.append(
        "from horoclone import checkpoint as checkpoint\n\n__version__: str\nHOROVOD_VERSION: str\n\n"
    )
    for name in horoclone._HOMES["arrays"]:
        lines.append(definition(name, getattr(arrays, name)) + "\n")
    return "".join(lines).rstrip("\n") + "\n"


def alias_stubs() -> dict[Path, str]:
    """The files of horovod-stubs, each of which hands on a module of horoclone."""
    files = {ALIAS / "__init__.pyi": "from horoclone import *\n", ALIAS / "py.typed": ""}
    packages = {module.rpartition(".")[0] for module in ALIASED}
    for module in ALIASED:
        parts = module.split(".")
        place = (
            ALIAS.joinpath(*parts, "__init__.pyi")
            if module in packages or len(parts) == 1
            else (ALIAS.joinpath(*parts).with_suffix(".pyi"))
        )
        below = sorted(one.rpartition(".")[2] for one in ALIASED if one.rpartition(".")[0] == module)
        lines = [f"from horoclone.{one} import *" for one in listing(module)]
        if not lines and (names := exported(module) - set(below)):
            spelled = "".join(f"    {one} as {one},\n" for one in sorted(names))
            lines = [f"from horoclone.{module} import (\n{spelled})"]
        lines += [f"from horovod.{module} import {one} as {one}" for one in below]
        files[place] = "".join(f"{line}\n" for line in lines)
    return files


def source_of(module: str) -> ast.Module:
    place = ROOT.joinpath("horoclone", *module.split("."))
    return ast.parse((place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text())


def all_of(module: str) -> tuple[set[str], list[str]]:
    """The names that the `__all__` of a module below horoclone spells out, and the modules whose lists it takes."""
    tree = source_of(module)
    others: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horoclone"):
            for alias in node.names:
                others[alias.asname or alias.name] = f"{node.module}.{alias.name}".removeprefix("horoclone.")
    names, taken = set(), []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List)
            for one in node.value.elts:
                if isinstance(one, ast.Starred):
                    taken.append(others[ast.unparse(one.value).removesuffix(".__all__")])
                else:
                    names.add(ast.literal_eval(one))
    return names, taken


def listing(module: str) -> list[str]:
    """The modules whose `__all__` make up that of a module below horoclone, itself last; none: it has no `__all__`. A
    type checker reads only names that are spelled out, not `[*other.__all__, "name"]`."""
    names, taken = all_of(module)
    lists = [one for other in taken for one in listing(other)]
    return [*dict.fromkeys(lists), module] if names or taken else []


def exported(module: str) -> set[str]:
    """What the `__all__` of a module below horoclone lists, or without one what it defines, read from the source: no
    framework has to be installed."""
    lists = listing(module)
    return set().union(*(all_of(one)[0] for one in lists)) if lists else defined_in(source_of(module))


def defined_in(tree: ast.Module) -> set[str]:
    """Public functions, classes and constants of a module, and classes that it takes from another one of horoclone."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horoclone"):
            names |= {alias.asname or alias.name for alias in node.names if alias.name[0].isupper()}
    return {name for name in names if not name.startswith("_")}


def main() -> int:
    files = {STUB: stub(), **alias_stubs()}
    if "--check" in sys.argv:
        old = [place for place, text in files.items() if not place.exists() or place.read_text() != text]
        print(*(f"not current: {place.relative_to(ROOT)}" for place in old), sep="\n")
        return 1 if old else 0
    for place, text in files.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
