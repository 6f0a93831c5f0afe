"""A parser of command lines whose errors are one message, with what the user may have meant."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from horoclone.launch.usage import LaunchError

_CHOICES = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_MAX_PROGRAMS = 20000  # on PATH; more are not looked at


class Parser(argparse.ArgumentParser):
    """Raises LaunchError with exit code 2 instead of printing and ending the process. summary: how to use it, in one
    line; None: argparse's own. examples: (what it does, command line), which stand first in the help."""

    def __init__(
        self,
        *args: Any,
        summary: str | None = None,
        examples: Sequence[tuple[str, str]] = (),
        **options: Any,
    ) -> None:
        options.setdefault("allow_abbrev", False)
        if summary is not None:
            options["usage"] = summary
        super().__init__(*args, **options)
        self._examples = examples
        self.is_subcommand = False  # then what it does not know is its own error, with its own flags in mind

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self.is_subcommand:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def format_help(self) -> str:
        """With the examples behind the line of usage."""
        usage, _, rest = super().format_help().partition("\n\n")
        width = max((len(line) for _, line in self._examples), default=0)
        lines = [f"  {line:<{width}}  # {what}" for what, line in self._examples]
        return "\n".join([usage, "", *(["examples:", *lines, ""] if lines else []), rest])

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}{self._meant(message)}\n{self.format_usage().strip()}   (--help)")

    def _meant(self, message: str) -> str:
        choices = _CHOICES.search(message)
        if choices:
            return did_you_mean(choices.group(1), re.findall(r"[\w-]+", choices.group(2)))
        if not message.startswith("unrecognized arguments: "):
            return ""
        flags = [
            flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS
        ]
        unknown = [word.partition("=")[0] for word in message.split()[2:] if word.startswith("-")]
        return "".join(did_you_mean(word, flags) for word in unknown)


def completing(parser: Parser) -> Parser:
    """The parser; where a shell asks for completions, argcomplete answers with its flags and ends the process."""
    if "_ARGCOMPLETE" in os.environ:
        try:
            import argcomplete
        except ImportError:
            raise SystemExit(1) from None
        argcomplete.autocomplete(parser)
    return parser


def number(text: str) -> float:
    """For argparse, whose own words for a wrong float name a function."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean --hosts?`, or nothing when no known word is like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def programs_on_path() -> list[str]:
    """The names of the programs that a shell would find."""
    found: set[str] = set()
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        try:
            with os.scandir(folder or ".") as entries:
                found.update(entry.name for entry in entries)
        except OSError:
            continue
        if len(found) > _MAX_PROGRAMS:
            break
    return sorted(found)
