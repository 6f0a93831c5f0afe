"""How many functions of the core a step of declared buckets enters once their plan is persistent, and which.

    python benchmarks/functions_of_a_step.py [--limit N] [--optimised N] [--json FILE] [--journey]

What is counted: functions defined in a file of csrc/ that rank 0's main thread enters between hc_submit_declared of
the first of four buckets and hc_release of the last. Two processes on one machine take part; there are no GPU and no
messages. Inline functions, constructors, lambdas and each instance of a template count as one each; those of the
standard library do not count. The core is compiled for it without optimisation, with a hook at the entry of every
function (CMake's HC_ENTRIES, in build/functions). Steps differ by some functions, as hc-engine may take part of the
work; the table shows the step with the middle count of 51.

The second count leaves out the functions that the optimised library has inlined everywhere, by the symbols of
build/*/libhoroclone.so. It is unknown where no such library has symbols.

Exit codes: 0, 1 a limit is exceeded, 2 the core could not be built or run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "functions"
PAGE = ROOT / "docs" / "architecture.md"
STEPS = 51


@dataclass(frozen=True)
class Entered:
    file: str  # below csrc/
    function: str
    calls: int
    in_library: bool | None  # a function of its own in the optimised library; None: no library to ask


@dataclass(frozen=True)
class Trace:
    functions: list[Entered]  # in the order of their first entry
    least: int  # functions in any of the steps
    most: int

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(entered.file for entered in self.functions))

    @property
    def optimised(self) -> int | None:
        known = [entered.in_library for entered in self.functions]
        return None if None in known else sum(map(bool, known))


def run(*command: str | Path, text: str | None = None) -> str:
    done = subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        print(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout


def build() -> Path:
    """The program, built as the C++ tests are: eight files are compiled as one."""
    options = ["-DHC_TESTS=ON", "-DHC_PYTHON=OFF", "-DHC_ENTRIES=ON"]
    options += ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=8"]
    run("cmake", "-S", ROOT, "-B", BUILD, *options)
    run("cmake", "--build", BUILD, "--target", "frozen_step", "--parallel", "2")
    return BUILD / "frozen_step"


def names_of(program: Path, addresses: list[str]) -> dict[str, tuple[str, str]]:
    """address -> (mangled name, file below csrc/, or "" where it is none of ours)."""
    lines = run("addr2line", "-f", "-e", program, text="\n".join(addresses)).splitlines()
    found = {}
    for address, name, place in zip(addresses, lines[::2], lines[1::2], strict=True):
        path = re.search(r"/csrc/([^:]+)", place)
        own = path is not None and not path.group(1).startswith("tests/")
        found[address] = (name, path.group(1) if own and path is not None else "")
    return found


def functions_of_library() -> set[str] | None:
    """Mangled names of the optimised library's functions, a clone's under the name of the whole."""
    libraries = sorted((ROOT / "build").glob("*/libhoroclone.so"), key=lambda path: -path.stat().st_mtime)
    for library in libraries:
        symbols = re.findall(r"^\S+ [tTwW] (\S+)$", run("nm", library), re.MULTILINE)
        if library.parent != BUILD and symbols:
            return {name.split(".")[0] for name in symbols}
    return None


def without_arguments(name: str) -> str:
    """`a<int>::b(int, char) const` without what is in parentheses behind the last name."""
    depth = 0
    for at in range(len(name) - 1, 0, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0 and name[at] == "(" and name[at:].split(")")[-1].strip() in ("", "const"):
            return name[:at]
    return name


def trace() -> Trace:
    program = build()
    steps: list[list[tuple[str, int]]] = []
    for line in run(program, str(STEPS)).splitlines():
        if line == "step":
            steps.append([])
        else:
            address, calls = line.split()
            steps[-1].append((address, int(calls)))
    names = names_of(program, sorted({address for step in steps for address, _ in step}))
    ours = [[(address, calls) for address, calls in step if names[address][1]] for step in steps]
    ours.sort(key=len)
    middle = ours[len(ours) // 2]
    library = functions_of_library()
    mangled = [names[address][0] for address, _ in middle]
    readable = run("c++filt", text="\n".join(mangled)).splitlines()
    functions = [
        Entered(
            names[address][1],
            without_arguments(shown.replace("(anonymous namespace)::", "")),
            calls,
            None if library is None else name in library,
        )
        for (address, calls), name, shown in zip(middle, mangled, readable, strict=True)
    ]
    return Trace(functions, len(ours[0]), len(ours[-1]))


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
        print(f"csrc/{file}: {len(functions)}")
        for entered in functions:
            mark = " " if entered.in_library is not False else "i"
            print(f"  {entered.calls:8d} {mark} {entered.function}")
    print("(i: the optimised library has inlined it everywhere)")
    print(
        f"\n{len(found.functions)} functions in {len(by_file)} files; {found.least} to {found.most} in {STEPS} steps"
    )
    optimised = "unknown, no library with symbols in build/" if found.optimised is None else found.optimised
    print(f"of these, functions of the optimised library: {optimised}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, help="fail where more functions are entered")
    parser.add_argument("--optimised", type=int, help="fail where more of the optimised library are entered")
    parser.add_argument("--json", type=Path, help="write the functions into this file")
    parser.add_argument("--journey", action="store_true", help="compare the table in docs/architecture.md")
    options = parser.parse_args()
    found = trace()
    print_table(found)
    if options.json:
        rows = {
            "count": len(found.functions),
            "least": found.least,
            "most": found.most,
            "optimised": found.optimised,
            "functions": [asdict(entered) for entered in found.functions],
        }
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.journey:
        absent, unnamed = compare_journey(found.files, PAGE.read_text())
        print(f"\nin the journey's table, not entered: {', '.join(absent) or 'none'}")
        print(f"entered, not in the table: {', '.join(unnamed) or 'none'}")
    over = options.limit is not None and len(found.functions) > options.limit
    if options.optimised is not None and (found.optimised is None or found.optimised > options.optimised):
        over = True
    if over:
        print("\nmore than the limit", file=sys.stderr)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
