"""`horoclone plan` and its ranks: those that it starts, or those of the job that it was started in by a launcher."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from horoclone.launch.usage import LaunchError
from horoclone.launch.views import check_packages
from horoclone.plan import command
from horoclone.plan.command import add_arguments
from horoclone.plan.profile import PlanError

ON_RANKS = "horoclone.plan.torch.ranks"  # by name: the launcher knows no framework


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Gives `horoclone` its subcommand; command(name, function, help) adds one."""
    what = "measure a model and the ranks; say which way of training is the fastest"
    add_arguments(command("plan", main, what))


def main(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code. LaunchError for a mistake in what was asked."""
    check_packages("horoclone plan")
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("horoclone plan needs PyTorch: pip install torch", 1)
    from horoclone.bootstrap.detect import detect

    placement = detect(os.environ)
    ranks = _InJob(placement.rank, placement.size) if placement.size > 1 else _Started(arguments)
    try:
        return command.main(arguments, ranks)
    except PlanError as error:
        if ranks.speaks:
            raise LaunchError(str(error)) from None
        return 2
    except OSError as error:
        raise LaunchError(f"--json {arguments.json}: {error.strerror or error}", 1) from None


def _on_rank(name: str, *given: Any) -> Any:
    return getattr(importlib.import_module(ON_RANKS), name)(*given)


def _value(answer: Any) -> Any:
    if answer.error:
        raise PlanError(answer.error)
    return answer.value


class _Started:
    """Ranks that are started for each call, on this host or on those of -H."""

    speaks = True

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._hosts, self._hostfile = arguments.hosts, arguments.hostfile
        self._size = 1

    def size_of(self, wished: int | None, per_node: int | None) -> tuple[int, int]:
        from horoclone.launch.hosts import usable_cores

        if wished is None:
            raise PlanError("for how many ranks? Give -np N, or start it on them with your launcher")
        per_node = min(per_node or wished, wished)
        # Somewhere else all of them run; here as many of a host's as have a core, but two, or nothing is sent.
        here = min(per_node, max(2, usable_cores()))
        self._size = wished if self._hosts or self._hostfile else here
        return wished, per_node

    def call(self, name: str, *given: Any) -> Any:
        from horoclone.launch.api import RunError, run

        try:
            answers = run(
                _on_rank, (name, *given), num_proc=self._size, hosts=self._hosts, hostfile=self._hostfile
            )
        except ValueError as error:
            raise PlanError(str(error).removeprefix("run(): ")) from None
        except RunError as error:
            raise LaunchError(
                f"a rank failed while it was measured:\n{str(error).removeprefix('run(): ')}", 1
            ) from None
        return _value(answers[0])


class _InJob:
    """This process is a rank of a job, which all run the command."""

    def __init__(self, rank: int, size: int) -> None:
        self.speaks = rank == 0
        self._size = size

    def size_of(self, wished: int | None, per_node: int | None) -> tuple[int, int]:
        if wished not in (None, self._size):
            raise PlanError(f"-np {wished}, but this job has {self._size} ranks: leave -np out")
        return self._size, per_node or self._size

    def call(self, name: str, *given: Any) -> Any:
        return _value(_on_rank(name, *given))
