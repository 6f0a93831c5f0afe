"""What a benchmark does around its measuring: options, its turn on the machine, noise, JSON, table, exit code.

Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from machine import Load, facts, load_before, only_one
from report import head_lines
from statistics_of import MAX_LOAD, loads_against

Result = dict[str, Any]


class Failed(Exception):
    """A rank failed or a number was wrong; the text says which."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="run and print although the machine is noisy, marked so"
    )
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds for which others' load is watched first"
    )
    parser.add_argument("--json", type=Path, help="write the result here")


def words_of(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the known words, separated by commas."""
    known = list(known)

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"no {what} {unknown[0]!r}; there are {', '.join(known)}")
        return words

    return parse


def say(text: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def run(
    arguments: argparse.Namespace,
    measure: Callable[[], Result],
    show: Callable[[Result], None],
) -> int:
    """Runs one benchmark and returns its exit code. measure() gives the result, whose "noise" may hold "reasons"."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended by whoever started them
    with only_one():
        before = load_before(arguments.settle)
        if before > MAX_LOAD and not arguments.force:
            say(
                f"too noisy, no conclusion: other processes use {before:.2f} cores (--force: run nevertheless)"
            )
            return 3
        load = Load()
        try:
            result = measure()
        except Failed as error:
            say(str(error))
            return 1
        during = load.others()
    noise = result.setdefault("noise", {})
    noise.update(others_before=before, others_during=during)
    reasons = [*loads_against(before, during), *noise.get("reasons", [])]
    noise.update(reasons=reasons, conclusive=not reasons)
    result.setdefault("machine", facts())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if reasons and not arguments.force:
        say("too noisy, no conclusion: " + "; ".join(reasons) + " (--force prints all the same)")
        return 3
    print("\n".join(head_lines(result)), end="\n\n")
    show(result)
    return 0
