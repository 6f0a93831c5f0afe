"""Runs torch's own tests of process groups, as the wheel of torch has them, on the backend `horoclone`.

    python tests/torch/torchs_own.py [-k name] [--ranks 3] [--in-place-of gloo] [--limit 120] [--names a b] [--report file]

Every test has new processes and a process group of its own. The processes are forked from one that has imported torch,
so that a test costs its work and not the import. With --in-place-of the tests believe that they run on that backend
(most of torch's skips go by backend names), and the group is horoclone's all the same. What torchs_own_listed.py names
is not run; --listed runs exactly that. A report is JSON: name -> [outcome, text].
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import unittest
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torchs_own_listed import listed

OURS = "horoclone"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="torch's own tests on the backend horoclone")
    parser.add_argument(
        "-k", action="append", default=[], metavar="TEXT", help="only tests whose names have this"
    )
    parser.add_argument("--names", nargs="*", help="exactly these tests")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument(
        "--in-place-of", choices=["gloo", "mpi"], help="the backend that the tests believe in"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one test has")
    parser.add_argument("--listed", action="store_true", help="run only what torchs_own_listed.py names")
    parser.add_argument("--list", action="store_true", help="print the names of the tests and end")
    parser.add_argument("--report", type=Path, help="where to write what came out, as JSON")
    return parser.parse_args()


class Report(unittest.TextTestResult):
    """Keeps name -> [outcome, text]."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.outcomes: dict[str, list[str]] = {}

    def note(self, test: Any, outcome: str, text: str = "") -> None:
        self.outcomes[test.id().split(".")[-1]] = [outcome, text]

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.note(test, "skipped", reason)

    def addFailure(self, test: Any, error: Any) -> None:
        super().addFailure(test, error)
        self.note(test, "failed", self._exc_info_to_string(error, test))

    def addError(self, test: Any, error: Any) -> None:
        super().addError(test, error)
        self.note(test, "failed", self._exc_info_to_string(error, test))


def chosen(names: list[str], arguments: argparse.Namespace) -> list[str]:
    out = listed(os.environ["BACKEND"])
    unknown = {*out, *(arguments.names or ())} - set(names)
    if unknown:
        raise SystemExit(f"torch has no such tests: {sorted(unknown)}")
    wanted = [name for name in names if (name in out) == arguments.listed]
    if arguments.names is not None:
        wanted = [name for name in wanted if name in arguments.names]
    return [name for name in wanted if not arguments.k or any(text in name for text in arguments.k)]


def prepare(arguments: argparse.Namespace) -> None:
    """torch's tests read these variables while they are imported, here and in the process that is forked."""
    os.environ["BACKEND"] = arguments.in_place_of or OURS
    os.environ["WORLD_SIZE"] = str(arguments.ranks)
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(arguments.limit))
    os.environ["TEMP_DIR"] = tempfile.gettempdir()
    os.environ["INIT_METHOD"] = "file://"  # each test gets a file of its own
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    forkserver.set_forkserver_preload(["torchs_own_ranks"])
    forkserver.ensure_running()  # it imports torch while we do


def main(arguments: argparse.Namespace) -> int:
    prepare(arguments)
    from torchs_own_ranks import OnHoroclone

    names = chosen(list(unittest.TestLoader().getTestCaseNames(OnHoroclone)), arguments)
    if arguments.list:
        print("\n".join(names))
        return 0
    suite = unittest.TestSuite(OnHoroclone(name) for name in names)
    try:
        result: Any = unittest.TextTestRunner(verbosity=2, resultclass=Report).run(suite)
    finally:
        forkserver._forkserver._stop()  # and wait for its end
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    for outcome, _ in result.outcomes.values():
        counts[outcome] += 1
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), flush=True)
    if arguments.report:
        arguments.report.write_text(json.dumps(result.outcomes, indent=1))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
