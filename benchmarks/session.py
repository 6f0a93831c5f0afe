"""What a benchmark does around its measuring: options, its turn on the machine, ranks, noise, JSON, table, exit code.

Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from machine import Load, facts, load_before, only_one
from report import head_lines
from statistics_of import MAX_LOAD, MIN_ROUNDS, loads_against

Result = dict[str, Any]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Failed(Exception):
    """A rank failed or a number was wrong; the text says which."""


def options(doc: str | None, argv: Sequence[str] | None, *own: tuple[Any, ...]) -> argparse.Namespace:
    """What the command line says. own: (flag, default, help) or, where the words are known, (flag, default, help,
    known). The type is the default's: a list stands for values with commas between, False for a flag without one."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for flag, default, text, *known in own:
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, list):
            item = type(default[0]) if default else int
            shown = ",".join(map(str, known[0] if known else default))
            parser.add_argument(flag, type=_list_of(item, *known), default=default, help=f"{text} ({shown})")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"{text} ({default})",
                                choices=list(known[0]) if known else None)  # fmt: skip
    add_options(parser)
    arguments = parser.parse_args(argv)
    for name in ("np", "rounds", "steps"):
        value = getattr(arguments, name, 1)
        if (min(value, default=0) if isinstance(value, list) else value) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="run and print although the machine is noisy, marked so"
    )
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds for which others' load is watched first"
    )
    parser.add_argument("--json", type=Path, help="write the result here")


def _list_of(item: Callable[[str], Any], known: Iterable[str] | None = None) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        words = text.split(";" if ";" in text else ",")
        if known is not None and text in known:
            words = [text]  # a name with a comma in it
        if unknown := [word for word in words if known is not None and word not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}, but {', '.join(known or ())}")
        return [item(word) for word in words]

    return parse


def on_ranks(call: Callable[..., Any], *arguments: Any, np: int, **environment: str) -> list[Any]:
    """What the function gives on every rank of a job of its own, one thread each. Failed when a rank fails."""
    import horoclone
    from horoclone.launch.api import RunError

    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    try:
        return horoclone.run(call, arguments, np=np, env={**ONE_THREAD, "PYTHONPATH": path, **environment})
    except RunError as error:
        raise Failed(str(error)) from None


def few(rounds: int) -> list[str]:
    """Why so many rounds allow no conclusion."""
    return (
        []
        if rounds >= MIN_ROUNDS
        else [f"{rounds} rounds are too few for an interval, which needs {MIN_ROUNDS}"]
    )


def refuse(text: str) -> NoReturn:
    """Ends the program: its arguments do not go together."""
    say(text)
    raise SystemExit(2)


def say(text: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace, measure: Callable[[], Result], show: Callable[[Result], None]) -> int:
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
    write(arguments.json, result)
    if reasons and not arguments.force:
        say("too noisy, no conclusion: " + "; ".join(reasons) + " (--force prints all the same)")
        return 3
    print("\n".join(head_lines(result)), end="\n\n")
    show(result)
    return 0


def write(path: Path | None, result: Any) -> None:
    """The result as JSON, where one was asked for."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
