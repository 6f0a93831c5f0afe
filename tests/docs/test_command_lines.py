"""Command lines in the documents are those that the real parsers accept, and the flags that sentences name exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from horoclone import optional
from horoclone.launch import options, tool
from horoclone.launch.usage import LaunchError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "packages/**/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"  # it also names what has been taken out
)
PROGRAMS = ("horoclonerun", "horoclone", "horovodrun")
STARTERS = ("srun", "mpirun", "mpiexec")  # what follows them may be a command of ours
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
# Flags of others' programs that sentences name in backticks.
FOREIGN = {
    *("--bind-to", "--map-by", "--prefix", "--with-ft", "-bind-to", "-localhost", "-x"),  # mpirun, mpiexec
    *("--allow-incomplete-ranks", "--gpus", "--kill-on-bad-exit", "--no-deps", "--shm-size"),
}


class Line(NamedTuple):
    """A command that a page shows. whole: in a block, to be typed as it stands; else within a sentence."""

    where: str
    words: list[str]
    whole: bool


def commands_of(text: str) -> list[list[str]]:
    """The words of each command in a line of shell, without assignments; nothing where it is no shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    try:
        read = list(lexer)
    except ValueError:  # an output with one quote
        return []
    found: list[list[str]] = [[]]
    for word in read:
        if set(word) <= set(";&|()"):
            found.append([])
        elif found[-1] or not re.match(r"\w+=", word):
            found[-1].append(word)
    return found


def ours(words: list[str]) -> list[str] | None:
    """The command from the word on that is a program of ours, where there is one."""
    for at, word in enumerate(words):
        module = words[at + 2] if words[at : at + 2] == ["python", "-m"] and len(words) > at + 2 else ""
        if word in PROGRAMS or module.startswith("horoclone"):
            return words[at:]
        if words[0] not in STARTERS:
            break
    return None


def lines_of(place: Path) -> Iterator[Line]:
    name, text = str(place.relative_to(ROOT)), place.read_text()
    if place.suffix == ".sbatch":
        blocks, sentences = [re.sub(r"\$\{?\w+(?::-(\w+))?\}?", lambda found: found[1] or "1", text)], ""
    elif place.suffix == ".py":
        blocks, sentences = [ast.get_docstring(ast.parse(text)) or ""], ""
    else:
        blocks = [found[3] for found in FENCED.finditer(text) if not found[2]]
        sentences = FENCED.sub("", text)
    for block in blocks:
        lines = block.replace("\\\n", " ").splitlines()
        typed = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
        for line in typed or lines:
            yield from (Line(name, words, True) for words in commands_of(line))
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", sentences):
        yield from (Line(name, words, False) for words in commands_of(span.replace("\n", " ")))


@cache
def all_lines() -> list[Line]:
    scripts = [*sorted(ROOT.glob("examples/*.py")), *sorted(ROOT.glob("deploy/slurm/*.sbatch"))]
    found = [line for place in [*PAGES, *scripts] for line in lines_of(place)]
    return [line._replace(words=part) for line in found if (part := ours(line.words)) is not None]


def filled_in(words: list[str]) -> list[str]:
    """With a value in the place of N, PORT, FILE or `...`, and without the brackets of what may be left out."""
    filled: list[str] = []
    for word in words:
        word = word.strip("[]")
        if word == "..." and not (filled and filled[-1].startswith("-")):
            continue
        filled.append("1" if re.fullmatch(r"[A-Z]{1,7}", word) else "host:1" if word == "..." else word)
    return filled


class Raising(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise LaunchError(message)


def what_is_wrong(line: Line) -> str | None:
    program, *words = filled_in(line.words)
    try:
        if program == "python":
            return wrong_module(words[1], words[2:])
        if program == "horoclone" and words[:1] != ["run"]:
            tool.build_parser().parse_args(words)
            return None
        words = words[1:] if words[:1] == ["run"] else words
        command = options.build_parser(program).parse_args(words).command
        if command[:2] == ["python", "-m"] and command[2].startswith("horoclone"):
            return wrong_module(command[2], command[3:])
        return wrong_script(command)
    except LaunchError as error:
        incomplete = re.search(r"expected .*argument|arguments are required", str(error))
        return None if incomplete and not line.whole else str(error)
    except SystemExit as end:  # --help
        return None if end.code == 0 else f"exit code {end.code}"


def wrong_module(module: str, words: list[str]) -> str | None:
    place = ROOT.joinpath(*module.split("."))
    if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
        return f"there is no module {module}"
    if module == "horoclone.ps":
        parser = optional.load("ps.__main__").parser()
        parser.__class__ = Raising
        parser.parse_args(words)
    return None


@cache
def flags_of(script: Path) -> set[str]:
    """The flags that a script, or a module beside it that it imports, has in quotes."""
    found: set[str] = set()
    seen, left = {script}, [script]
    while left:
        text = left.pop().read_text()
        found.update(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", text))
        for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.M):
            beside = script.with_name(f"{name}.py")
            if beside.exists() and beside not in seen:
                seen.add(beside)
                left.append(beside)
    return found


def wrong_script(command: list[str]) -> str | None:
    """A script of this repository has to exist and to know its flags."""
    ours = re.compile(r"(?:examples|benchmarks|docs)/.*\.py$")
    at = next((at for at, word in enumerate(command) if ours.match(word)), None)
    if at is None:
        return None
    script = ROOT / command[at]
    if not script.exists():
        return f"there is no {command[at]}"
    flags = {word.partition("=")[0] for word in command[at + 1 :] if re.match(r"--?[a-z]", word)}
    unknown = flags - flags_of(script) - {"--help"}
    return f"{command[at]} has no {', '.join(sorted(unknown))}" if unknown else None


def test_every_command_line_is_accepted_by_the_real_parser() -> None:
    lines = all_lines()
    assert len(lines) > 130, len(lines)
    wrong = {
        f"{line.where}: {shlex.join(line.words)}": said for line in lines if (said := what_is_wrong(line))
    }
    assert not wrong, wrong


def test_scripts_that_the_pages_start_exist_and_know_their_flags() -> None:
    start = re.compile(r"\b(?:python|torchrun --nproc-per-node \d+) ((?:examples|benchmarks|docs)/[^`\n]+)")
    wrong, seen = {}, 0
    for page in [*PAGES, *ROOT.glob("docs/decisions/*.md"), *ROOT.glob("benchmarks/*.py")]:
        for found in start.findall(page.read_text().replace("\\\n", " ")):
            for words in commands_of(found):
                seen += 1
                if said := wrong_script(filled_in(words)):
                    wrong[f"{page.relative_to(ROOT)}: {shlex.join(words)}"] = said
    assert seen > 40
    assert not wrong, wrong


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= options_of(sub)
    return found


def test_every_flag_that_a_sentence_names_exists() -> None:
    known = options_of(options.build_parser("horoclonerun")) | options_of(tool.build_parser())
    known |= options_of(pytest.importorskip("horoclone.ps.__main__").parser()) | set(FOREIGN)
    for place in (
        "examples/*.py",
        "benchmarks/*.py",
        "horoclone/tensorflow/data/compute_worker.py",
        "docs/*.py",
        "tests/conftest.py",  # flags of pytest
    ):
        for script in ROOT.glob(place):
            known |= flags_of(script)
    unknown, seen = set(), 0
    for page in PAGES:
        for span in re.findall(r"(?<!`)`(-[^`]+)`(?!`)", FENCED.sub("", page.read_text())):
            for flag in re.findall(r"(?:^|(?<=\s))--?[A-Za-z][\w-]*", span):
                seen += 1
                if flag not in known:
                    unknown.add(f"{page.relative_to(ROOT)}: {flag}")
    assert seen > 100
    assert not unknown, sorted(unknown)
