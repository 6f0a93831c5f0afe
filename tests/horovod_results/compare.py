"""Replays recorded cases of Horovod on real ranks and says which of them differ, and which of those are listed.

python tests/horovod_results/compare.py            every suite; exit code 1 if a case is neither equal nor listed
python tests/horovod_results/compare.py torch-2    one suite
python tests/horovod_results/compare.py torch-2 'torch[.]allreduce'    its cases that match
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from replay import framework_of, run_cases
from table import HERE, Suite, suites


def _harness() -> tuple[Any, Any]:
    """world.py and worker_pool.py, without their folder on sys.path, where `torch` would be the folder of that name."""
    if "world" not in sys.modules:
        spec = importlib.util.spec_from_file_location("world", HERE.parent / "world.py")
        assert spec is not None and spec.loader is not None
        sys.modules["world"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["world"])
        for name in ("namespaces", "worker_pool"):
            sys.modules["world"].load(HERE.parent / f"{name}.py", name)
    return sys.modules["world"], sys.modules["worker_pool"]


world, worker_pool = _harness()
TOLERANCE = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}  # relative
ROUND_LIMIT_S = 400.0  # one start of the ranks


@dataclass
class Difference:
    """A case whose result here is not Horovod's: the first place, in the order of the ranks."""

    case: str
    rank: int
    where: str
    theirs: Any
    ours: Any
    kinds: tuple[str, str]  # how the case ended there and here: value, error, hang, died
    text: str = ""  # of our error
    far: float = math.inf  # the largest relative difference, where only real numbers differ

    def within(self, limit: float) -> bool:
        return self.far <= limit

    def __str__(self) -> str:
        said = f" ({self.text})" if self.text else ""
        return f"{self.case} rank{self.rank}{self.where}: Horovod {_short(self.theirs)}, here {_short(self.ours)}{said}"


@dataclass
class Entry:
    """One entry of deliberate.yaml: a family of cases that differ on purpose."""

    key: str
    says: dict[str, Any]
    patterns: list[re.Pattern[str]]
    suites: re.Pattern[str]
    covered: set[str] = field(default_factory=set)

    def names(self, label: str, case: str) -> bool:
        return bool(self.suites.fullmatch(label)) and any(each.fullmatch(case) for each in self.patterns)

    def covers(self, suite: Suite, difference: Difference) -> bool:
        theirs, ours = difference.kinds
        if "last_places" in self.says and not difference.within(float(self.says["last_places"])):
            return False
        if theirs not in self.says.get("horovod", [theirs]) or ours not in self.says.get("here", [ours]):
            return False
        return self.names(suite.label, difference.case)


@dataclass
class Compared:
    suite: Suite
    equal: list[str]
    listed: dict[str, str]  # case: key of the entry
    neither: list[Difference]


def entries() -> list[Entry]:
    """The list of what differs on purpose, in its order; the first entry that covers a case counts."""
    listed = yaml.safe_load((HERE / "deliberate.yaml").read_text())
    return [
        Entry(key, says, [re.compile(each) for each in says["cases"]], re.compile(says.get("suites", ".*")))
        for key, says in listed.items()
    ]


# --- running ----------------------------------------------------------------------------------------------


def replay(suite: Suite, pattern: str = "") -> list[dict[str, dict[str, Any]]]:
    """By rank, how each case ended here. The ranks are started again behind a case that ended them."""
    todo = [case["id"] for case in suite.cases if re.search(pattern, case["id"])]
    ended: list[dict[str, dict[str, Any]]] = [{} for _ in range(suite.ranks)]
    while todo:
        with tempfile.TemporaryDirectory() as folder:
            broke = _run(suite, todo, folder)
            last = _read(suite, todo, Path(folder), ended)
        if last is None and not broke:
            return ended
        if last is None:
            raise RuntimeError(f"{suite.label}: the ranks ended before the first case:\n{broke[-4000:]}")
        for rank in range(suite.ranks):
            ended[rank].setdefault(last, {"died": True})
        done = todo.index(last) + 1
        todo = todo[done:]
    return ended


IMPORTED = {"torch": "horoclone.torch", "tf": "horoclone.tensorflow"}


@functools.cache
def worlds_of(name: str) -> Any:
    """The ranks of a suite: each start is a fork of a process that has imported its framework."""
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    if name == "tf-keras":
        env["TF_USE_LEGACY_KERAS"] = "1"
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    imported = [IMPORTED[framework_of(name)]]
    return world.Worlds(env, lambda _: worker_pool.warm_processes(f"{name} of Horovod", whole, imported))


def end_ranks() -> None:
    world.end_all()
    worker_pool.end_warm_processes()


def _run(suite: Suite, todo: list[str], folder: str) -> str:
    """What the ranks said if one of them ended before the last case; else nothing."""
    pool = worlds_of("tf-keras" if suite.name == "tf-keras" else framework_of(suite.name))
    job = {"suite": suite.name, "ranks": suite.ranks, "folder": folder, "todo": todo}
    try:
        pool.run(suite.ranks, run_cases, init=False, limit_s=ROUND_LIMIT_S, **job)
    except world.WorldFailed as failed:
        return str(failed)
    finally:
        pool.end()  # each suite has processes of its own, as it had with Horovod
    return ""


def _read(suite: Suite, todo: list[str], folder: Path, ended: list[dict[str, dict[str, Any]]]) -> str | None:
    """Adds what the ranks wrote; the case at which they stopped, or None if they ran through."""
    began: list[str | None] = []
    for rank in range(suite.ranks):
        path = folder / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for line in lines:
            if "end" in line:
                ended[rank][line["id"]] = line["end"]
        began.append(lines[-1]["id"] if lines else None)
    order = [case["id"] for case in suite.cases]
    reached = [order.index(each) for each in began if each is not None]
    if not reached:
        return None
    last = order[max(reached)]
    final = todo[-1]
    through = last == final and all(final in each for each in ended)
    alive = all(_works(each.get(last, {})) for each in ended)
    return None if through and alive else last


def _works(end: dict[str, Any]) -> bool:
    return end.get("after") == "works"


# --- comparing --------------------------------------------------------------------------------------------


def compare(suite: Suite, pattern: str = "", among: list[Entry] | None = None) -> Compared:
    ours = replay(suite, pattern)
    result = Compared(suite, [], {}, [])
    among = entries() if among is None else among
    for case in suite.cases:
        if case.get("unstable") or not re.search(pattern, case["id"]):
            continue
        difference = differs(suite, case, ours)
        if difference is None:
            result.equal.append(case["id"])
            continue
        entry = next((each for each in among if each.covers(suite, difference)), None)
        if entry is None:
            result.neither.append(difference)
        else:
            entry.covered.add(f"{suite.label} {case['id']}")
            result.listed[case["id"]] = entry.key
    return result


def differs(suite: Suite, case: dict[str, Any], ours: list[dict[str, dict[str, Any]]]) -> Difference | None:
    found: Difference | None = None
    for rank in range(suite.ranks):
        theirs = case["all"] if "all" in case else case["ranks"][rank]
        here = ours[rank].get(case["id"], {"died": True})
        place = _first_difference(theirs, here)
        if place is not None and (found is None or found.where == ".after"):
            kinds = (_kind(theirs), _kind(here))
            found = Difference(case["id"], rank, *place, kinds=kinds, text=here.get("text", ""))
    if found is not None and found.kinds == ("value", "value"):
        found.far = max(
            _far(case["all"] if "all" in case else case["ranks"][rank], ours[rank][case["id"]])
            for rank in range(suite.ranks)
        )
    return found


def _far(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    """How far the real numbers of a case are apart, as a part of the larger; infinite where anything else differs."""
    far = 0.0
    for _, one, other in places(theirs["out"], ours["out"], ""):
        real = isinstance(one, float) and isinstance(other, float)
        largest = max(1.0, abs(one), abs(other)) if real else 1.0
        far = max(far, abs(one - other) / largest if real and math.isfinite(largest) else math.inf)
    return far


def _kind(end: dict[str, Any]) -> str:
    return "value" if "out" in end else next(each for each in ("error", "hang", "died") if each in end)


def _first_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[str, Any, Any] | None:
    kinds = (_kind(theirs), _kind(ours))
    if kinds[0] != kinds[1]:
        return (f".{kinds[0]}", theirs.get(kinds[0], theirs), ours.get(kinds[1], ours))
    if kinds[0] == "error" and theirs["error"][0] not in ours["error"]:
        return (".error", theirs["error"], ours["error"])
    if kinds[0] == "value":
        for place in places(theirs["out"], ours["out"], ""):
            return place
    if "after" not in theirs and not _works(ours) and kinds[0] in ("value", "error"):
        return (".after", "works", ours.get("after"))
    return None


def places(theirs: Any, ours: Any, where: str, dtype: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two encoded results differ."""
    if _is_error(theirs) and _is_error(ours):
        if theirs[0] not in ours:
            yield where, theirs, ours
    elif isinstance(theirs, dict) and isinstance(ours, dict) and set(theirs) == set(ours):
        kind = next(
            (theirs[each] for each in ("torch", "tf", "np") if isinstance(theirs.get(each), str)), dtype
        )
        for name, item in theirs.items():
            yield from places(item, ours[name], f"{where}.{name}", kind if name == "v" else "")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for at, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from places(one, other, where if dtype else f"{where}[{at}]", dtype)
    elif not _same(theirs, ours, dtype):
        yield where, theirs, ours


def _is_error(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and value[-1] == "Exception"


def _same(theirs: Any, ours: Any, dtype: str) -> bool:
    real = isinstance(theirs, float) and isinstance(ours, int | float) and not isinstance(ours, bool)
    if real and dtype in ("", *TOLERANCE):
        return math.isclose(theirs, ours, rel_tol=TOLERANCE.get(dtype, 1e-5), abs_tol=1e-7)
    return type(theirs) is type(ours) and theirs == ours


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) < 160 else text[:157] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="?", help="as in torch-2 or tf-keras-3; all, if none is named")
    parser.add_argument(
        "cases", nargs="?", default="", help="only cases in whose name this regular expression is found"
    )
    parser.add_argument(
        "--all", action="store_true", help="show every case that differs, the listed ones too"
    )
    chosen = parser.parse_args()
    bad = 0
    for suite in suites():
        if chosen.suite not in (None, suite.label):
            continue
        compared = compare(suite, chosen.cases, [] if chosen.all else None)
        for difference in compared.neither:
            print(f"  {difference}")
        by_entry = ", ".join(
            f"{key} {count}" for key, count in Counter(compared.listed.values()).most_common()
        )
        print(
            f"{suite.label}: {len(compared.equal)} equal, {len(compared.listed)} listed ({by_entry}), "
            f"{len(compared.neither)} neither",
            flush=True,
        )
        bad += len(compared.neither)
    end_ranks()
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
