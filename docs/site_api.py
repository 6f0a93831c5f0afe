"""What griffe calls while it reads the package for the API pages (mkdocs.yml).

Docstrings are written for a terminal: arguments follow each other in a paragraph, as `name: what it is.` Here they
become a list, and a file of docs/ that is named becomes a link. And in a stub an overloaded function has no
implementation, so that griffe leaves it out (`horoclone.alltoall`): here it gets one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import griffe

_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
# Where a description of an argument begins: behind a full stop, or at the beginning of a paragraph.
_ARGUMENT = re.compile(r"(?:^|(?<=[.] ))(\w+)((?:(?:,| and) \w+)*)((?: \([^()]*\))?): ")

# What follows the last argument and is about the whole function.
_WHOLE = re.compile(
    r"(?<=[.] )(?=(?:Raises|Returns|Needs|Call|Mismatch|PeerLost|NothingSaved|NotInitialized|Unsupported|\w+Error)\b)"
)


def with_list(paragraph: str, names: Iterable[str]) -> str:
    """The paragraph with an item for each argument that it describes. names: those of the function's arguments."""
    known, text = set(names), " ".join(paragraph.split())
    begins = [found.start() for found in _ARGUMENT.finditer(text) if found[1] in known]
    if not begins:
        return paragraph
    ends = [*begins[1:], len(text)]
    items = []
    for begin, end in zip(begins, ends, strict=True):
        item = text[begin:end].strip()
        name = _ARGUMENT.match(item)
        assert name is not None
        others = re.sub(r"\w+", lambda word: word[0] if word[0] == "and" else f"`{word[0]}`", name[2])
        items.append(f"- `{name[1]}`{others}{name[3]}: {item[name.end() :]}")
    before = text[: begins[0]].strip()
    items[-1], *after = _WHOLE.split(items[-1], maxsplit=1)
    return "\n\n".join(part for part in (before, "\n".join(items), *after) if part)


def for_a_page(text: str, names: Iterable[str]) -> str:
    """A docstring as Markdown of an API page."""
    listed = tuple(names)
    paragraphs = [with_list(one, listed) for one in re.split(r"\n[ ]*\n", text)]
    return _PAGE.sub(r"[\1.md](../\1.html)", "\n\n".join(paragraphs))


def _classes(of: griffe.Object) -> Iterator[griffe.Class]:
    """All classes below a module or class."""
    for member in of.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Class | griffe.Module):
            yield from _classes(member)


class ApiPages(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = for_a_page(func.docstring.value, (one.name for one in func.parameters))

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            init = cls.members.get("__init__")
            names = (one.name for one in init.parameters) if isinstance(init, griffe.Function) else ()
            cls.docstring.value = for_a_page(cls.docstring.value, names)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """A class may say `__doc__ = Other.__doc__`."""
        for cls in _classes(pkg):
            said = cls.members.get("__doc__")
            source = str(said.value) if isinstance(said, griffe.Attribute) else ""
            if source.endswith(".__doc__"):
                first, _, rest = source.removesuffix(".__doc__").partition(".")
                path = ".".join(part for part in (cls.resolve(first), rest) if part)
                cls.docstring = pkg[path.removeprefix(f"{pkg.path}.")].docstring

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Makes a function of the overloads in a stub: the parameters of the last, the docstring of the first."""
        if isinstance(mod.filepath, list) or mod.filepath.suffix != ".pyi":
            return
        for name, overloads in list(mod.overloads.items()):
            if overloads and name not in mod.members:
                first, last = overloads[0], overloads[-1]
                function = griffe.Function(
                    name, parameters=last.parameters, returns=last.returns, lineno=first.lineno,
                    endlineno=last.endlineno, docstring=first.docstring, parent=mod,
                )  # fmt: skip
                function.overloads = list(overloads)
                mod.set_member(name, function)
                del mod.overloads[name]
