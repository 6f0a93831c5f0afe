"""How many functions of the core a step of declared buckets enters once their plan is persistent, and which.

    python csrc/tests/engine/functions_of_a_step.py [--limit N] [--json FILE] [--journey] [--library FILE]

What is counted: functions of the optimised libhoroclone.so, as it is installed, that any thread of rank 0 enters
between hc_submit_declared of the first of four buckets and hc_release of the last. What the compiler has inlined is
no function any more; functions of the standard library do not count. Two processes on one machine take part; there
are no GPU and no messages. A breakpoint at the beginning of each function tells (csrc/tests/engine/persistent_step.cc).
Steps differ by some functions, as hc-engine may take part of the work; the table shows the step with the middle count
of 51.

It needs a libhoroclone.so with symbols: the newest in build/*/, where `make` has put it, or --library. It runs on
x86-64.

Exit codes: 0, 1 the limit is exceeded, 2 the program could not be built or run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("persistent_step.cc")
ROOT = SOURCE.parents[3]
PAGE = ROOT / "docs" / "architecture.md"
STEPS = 51


@dataclass(frozen=True)
class Entered:
    file: str  # below csrc/; "" where it was not found
    function: str


@dataclass(frozen=True)
class Trace:
    functions: list[Entered]  # by file
    least: int  # functions in any of the steps
    most: int

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(entered.file for entered in self.functions if entered.file))


def run(*command: str | Path, text: str | None = None) -> str:
    done = subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        print(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout


def newest_library() -> Path:
    """The newest libhoroclone.so in build/ that was optimised and has symbols."""
    libraries = sorted((ROOT / "build").glob("*/libhoroclone.so"), key=lambda path: -path.stat().st_mtime)
    for library in libraries:
        cache = library.parent / "CMakeCache.txt"
        plain = not cache.exists() or re.search(r"^HC_SANITIZE:STRING=$", cache.read_text(), re.MULTILINE)
        if plain and "hc_wait" in run("nm", library):
            return library
    print("no libhoroclone.so with symbols in build/: pip install -e . builds one", file=sys.stderr)
    raise SystemExit(2)


def functions_of(library: Path) -> dict[int, str]:
    """offset -> mangled name of each function that the library defines."""
    rows = (line.split() for line in run("readelf", "-sW", library).splitlines())
    return {
        int(row[1], 16): row[7]
        for row in rows
        if len(row) > 7 and row[3] == "FUNC" and row[6] != "UND" and int(row[1], 16) != 0
    }


class Sources:
    """Finds the file that defines a function, by its name."""

    def __init__(self) -> None:
        paths = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".cc", ".h")]
        own = [path for path in paths if "tests" not in path.parts and path.name != "horoclone.h"]
        self._texts = {str(path.relative_to(ROOT / "csrc")): path.read_text() for path in own}

    def _defines(self, pattern: str, suffix: str) -> str:
        return next(
            (
                file
                for file, text in self._texts.items()
                if file.endswith(suffix) and re.search(pattern, text, re.MULTILINE)
            ),
            "",
        )

    def file_of(self, function: str) -> str:
        """`Class::name` or `name`, without arguments; "" where it is not found."""
        plain = re.sub(r"<.*?>", "", re.sub(r"::\{lambda.*", "", re.sub(r"^.* (?=hc)", "", function)))
        parts = [part for part in plain.split("::") if part not in ("hc", "")]
        owner, name = "::".join(parts[:-1]), re.escape(parts[-1])
        if not owner:
            return self._defines(rf"^[^\s/#].*\b{name}\(", ".cc") or self._defines(rf"\b{name}\(", ".h")
        last = re.escape(parts[-2])
        member = self._defines(rf"^[^\s/#].*\b{last}::{name}\(", ".cc")
        return member or self._defines(rf"^ *(class|struct) {last}\b[^;]*\{{", "")


def build(library: Path) -> Path:
    program = ROOT / "build" / "functions" / "persistent_step"
    program.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    places = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}"]
    # -rdynamic: the library calls the program's pthread_sigmask.
    options = ["-std=c++20", "-O1", "-rdynamic", f"-I{ROOT / 'csrc' / 'include'}"]
    run(compiler, *options, SOURCE, *places, "-lhoroclone", "-lpthread", "-ldl", "-o", program)
    return program


def is_ours(readable: str) -> bool:
    """False for functions of the standard library, but for the calls of our lambdas through std::function."""
    name = without_arguments(readable)
    if name.endswith("::_M_invoke"):
        return "hc::" in name
    return re.match(r"(\S+ )*?(std|__gnu_cxx)::", name) is None and re.search(r"\bhc(::|_)", name) is not None


def without_arguments(name: str) -> str:
    """`a<int>::b(int, char) const` without what is in parentheses behind the last name."""
    depth = 0
    for at in range(len(name) - 1, 0, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0 and name[at] == "(" and name[at:].split(")")[-1].strip() in ("", "const"):
            return name[:at]
    return name


def trace(library: Path | None = None) -> Trace:
    library = (library or newest_library()).resolve()
    functions = functions_of(library)
    mangled = list(functions.values())
    shown = run("c++filt", text="\n".join(mangled)).replace("(anonymous namespace)::", "").splitlines()
    readable = {
        offset: without_arguments(re.sub(r" \[clone [^]]*\]", "", name))
        for offset, name in zip(functions, shown, strict=True)
        if is_ours(name)
    }
    sources = Sources()
    steps: list[list[int]] = []
    for line in run(
        build(library), str(STEPS), text="\n".join(format(offset, "x") for offset in readable)
    ).splitlines():
        if line == "step":
            steps.append([])
        else:
            steps[-1].append(int(line, 16))
    steps.sort(key=len)
    middle = steps[len(steps) // 2]
    entered = [Entered(sources.file_of(readable[offset]), readable[offset]) for offset in middle]
    return Trace(
        sorted(entered, key=lambda function: (function.file, function.function)),
        len(steps[0]),
        len(steps[-1]),
    )


def core_places(page: str) -> list[str]:
    """What the column `where` of the journey's table names in the core."""
    section = page.split("## One gradient's journey", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[2] for line in section.splitlines() if re.match(r"\|\s*\d+\s*\|", line)]
    named = [place for row in rows for place in re.findall(r"`([^`]+)`", row)]
    return [
        place.removeprefix("csrc/")
        for place in named
        if not place.endswith((".py", ")")) and not place.startswith("csrc/python")
    ]


def is_at(file: str, place: str) -> bool:
    """A place is a file, a file without its suffix, or a folder."""
    return file == place or file.rsplit(".", 1)[0] == place or file.startswith(place.rstrip("/") + "/")


def compare_journey(files: list[str], page: str) -> tuple[list[str], list[str]]:
    """(places of the table that the step does not enter, entered files that no place of the table covers)."""
    places = core_places(page)
    absent = [place for place in places if not any(is_at(file, place) for file in files)]
    unnamed = [file for file in files if not any(is_at(file, place) for place in places)]
    return absent, unnamed


def print_table(found: Trace) -> None:
    by_file: dict[str, list[Entered]] = defaultdict(list)
    for entered in found.functions:
        by_file[entered.file].append(entered)
    for file, functions in by_file.items():
        print(f"csrc/{file}: {len(functions)}" if file else f"not found: {len(functions)}")
        for entered in functions:
            print(f"  {entered.function}")
    print(f"\n{len(found.functions)} functions; {found.least} to {found.most} in {STEPS} steps")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, help="fail where more functions are entered")
    parser.add_argument("--json", type=Path, help="write the functions into this file")
    parser.add_argument("--journey", action="store_true", help="compare the table in docs/architecture.md")
    parser.add_argument("--library", type=Path, help="a libhoroclone.so with symbols")
    options = parser.parse_args()
    found = trace(options.library)
    print_table(found)
    if options.json:
        rows = {
            "count": len(found.functions),
            "least": found.least,
            "most": found.most,
            "functions": [asdict(entered) for entered in found.functions],
        }
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.journey:
        absent, unnamed = compare_journey(found.files, PAGE.read_text())
        print(f"\nin the journey's table, not entered: {', '.join(absent) or 'none'}")
        print(f"entered, not in the table: {', '.join(unnamed) or 'none'}")
    if options.limit is not None and len(found.functions) > options.limit:
        print("\nmore than the limit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
