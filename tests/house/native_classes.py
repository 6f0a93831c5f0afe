"""The classes of csrc as clang's parser sees them: where each one's members are defined, its fields, its friends.

    python tests/house/native_classes.py [PART PARTS]

prints them as JSON; with two numbers only those that part PART (from 0) of PARTS finds. Needs `pip install libclang`,
which brings the parser; the standard library's headers are those of g++. Files of one layer are read as one, and in
smaller groups where their names collide: most of the time goes into the headers that they share.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clang import cindex

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
RECORDS = {cindex.CursorKind.CLASS_DECL, cindex.CursorKind.STRUCT_DECL, cindex.CursorKind.CLASS_TEMPLATE}
MEMBERS = {
    cindex.CursorKind.CXX_METHOD,
    cindex.CursorKind.CONSTRUCTOR,
    cindex.CursorKind.DESTRUCTOR,
    cindex.CursorKind.CONVERSION_FUNCTION,
    cindex.CursorKind.FUNCTION_TEMPLATE,
    cindex.CursorKind.VAR_DECL,
}
# What gcc's headers of intrinsics have clang's parser does not take; bodies are not read, so nobody misses it.
INTRINSICS = ("immintrin.h", "x86intrin.h")


class Unreadable(Exception):
    """What the parser says."""


def sources() -> list[Path]:
    """The core and the handlers of frameworks; those for Python need pybind11's headers."""
    found = sorted(path for path in CSRC.rglob("*.cc"))
    return [path for path in found if not {"tests", "python"} & set(path.relative_to(CSRC).parts)]


def in_batches() -> list[list[Path]]:
    """The files of each layer."""
    layers: dict[str, list[Path]] = {}
    for path in sources():
        layers.setdefault(path.relative_to(CSRC).parts[0], []).append(path)
    return list(layers.values())


def options_of_compiler(empty_headers: str) -> list[str]:
    command = [os.environ.get("CXX", "g++"), "-E", "-xc++", "-", "-v"]
    said = subprocess.run(command, input="", capture_output=True, text=True, check=True).stderr
    listed = said.split("#include <...> search starts here:")[1].split("End of search list")[0].split("\n")
    system = [option for line in listed if line.strip() for option in ("-isystem", line.strip())]
    own = [f"-I{empty_headers}", f"-I{CSRC}", f"-I{CSRC / 'include'}", '-DHC_VERSION_TEXT="0"']
    return ["-xc++", "-std=c++20", "-nostdinc", "-nostdinc++", *own, *system]


def parse(files: list[Path], options: list[str]) -> Iterator[cindex.TranslationUnit]:
    """One unit of all files, or units of fewer where these do not go together."""
    text = "".join(f'#include "{path}"\n' for path in files)
    unit = cindex.Index.create().parse(
        "together.cc",
        args=options,
        unsaved_files=[("together.cc", text)],
        options=cindex.TranslationUnit.PARSE_SKIP_FUNCTION_BODIES,
    )
    wrong = [str(said) for said in unit.diagnostics if said.severity >= cindex.Diagnostic.Error]
    if not wrong:
        yield unit
    elif len(files) > 1:
        half = len(files) // 2
        yield from parse(files[:half], options)
        yield from parse(files[half:], options)
    else:
        raise Unreadable("\n".join(wrong[:5]))


def own_path(cursor: cindex.Cursor) -> str:
    """Below csrc/; "" where it is none of ours."""
    file = cursor.location.file
    path = Path(os.path.normpath(file.name)) if file is not None else None
    return path.relative_to(CSRC).as_posix() if path is not None and path.is_relative_to(CSRC) else ""


def qualified(cursor: cindex.Cursor) -> str:
    names: list[str] = []
    while cursor is not None and cursor.kind != cindex.CursorKind.TRANSLATION_UNIT:
        if cursor.kind != cindex.CursorKind.NAMESPACE:
            names.insert(0, cursor.spelling)
        cursor = cursor.semantic_parent
    return "::".join(names)


def own_cursors(cursor: cindex.Cursor) -> Iterator[cindex.Cursor]:
    """Everything in our own files, at any depth outside functions."""
    for child in cursor.get_children():
        if own_path(child):
            yield child
            if child.kind in RECORDS or child.kind in (
                cindex.CursorKind.NAMESPACE,
                cindex.CursorKind.LINKAGE_SPEC,
            ):
                yield from own_cursors(child)


def described(record: cindex.Cursor) -> dict[str, Any]:
    children = list(record.get_children())
    fields = [child for child in children if child.kind == cindex.CursorKind.FIELD_DECL]
    friends = [child for child in children if child.kind == cindex.CursorKind.FRIEND_DECL]
    return {
        "file": own_path(record),
        "fields": [field.spelling for field in fields],
        "callbacks": [
            field.spelling
            for field in fields
            if field.type.get_canonical().spelling.startswith("std::function<")
        ],
        "friends": sorted(
            re.sub(r"\s+", " ", " ".join(token.spelling for token in friend.get_tokens()))
            for friend in friends
        ),
        "members_in": [],
    }


def collect(unit: cindex.TranslationUnit, classes: dict[str, dict[str, Any]]) -> None:
    defined: dict[str, set[str]] = {}
    for cursor in own_cursors(unit.cursor):
        if cursor.kind in RECORDS and cursor.is_definition() and cursor.spelling:
            # Two files may have an unnamed namespace each with a class of one name.
            inner = own_path(cursor) if own_path(cursor).endswith(".cc") else ""
            key = f"{qualified(cursor)} ({inner})" if inner else qualified(cursor)
            classes.setdefault(key, described(cursor))
        parent = cursor.semantic_parent
        # Outside its class a member is named only where it is defined. (Bodies are not read, so none is a definition.)
        outside = cursor.kind in MEMBERS and cursor.lexical_parent != parent
        if outside and parent is not None and parent.kind in RECORDS:
            defined.setdefault(qualified(parent), set()).add(own_path(cursor))
    for name, files in defined.items():
        if name in classes:
            in_cc = {file for file in files if file.endswith(".cc")}
            classes[name]["members_in"] = sorted({*classes[name]["members_in"], *in_cc})


def classes_of(batches: list[list[Path]]) -> dict[str, dict[str, Any]]:
    classes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as empty_headers:
        for name in INTRINSICS:
            Path(empty_headers, name).touch()
        options = options_of_compiler(empty_headers)
        for batch in batches:
            for unit in parse(batch, options):
                collect(unit, classes)
    return classes


if __name__ == "__main__":
    part, parts = map(int, sys.argv[1:] or ("0", "1"))
    try:
        print(json.dumps(classes_of(in_batches()[part::parts])))
    except Unreadable as error:
        sys.exit(str(error))
