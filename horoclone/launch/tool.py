"""The `horoclone` command and its subcommands: run, top, leave, doctor, debug, timeline, simulate, sockets,
plan, check-build."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from horoclone.launch.command_line import Parser, completing, number
from horoclone.launch.usage import LaunchError, say

PROGRAM = "horoclone"
Command = Callable[[argparse.Namespace], int]


def main(argv: list[str] | None = None) -> int:
    """Runs the `horoclone` command with `argv` (sys.argv[1:] by default) and returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["run"]:  # horoclonerun's own command line, to its end
        from horoclone.launch import cli

        return cli.main(words[1:], f"{PROGRAM} run")
    if words == ["help"]:
        words = ["--help"]
    elif words == ["version"]:
        words = ["--version"]
    try:
        arguments = completing(build_parser()).parse_args(words)
        command: Command = arguments.does
        return command(arguments)
    except LaunchError as error:
        say(str(error), PROGRAM)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains once more at its end
        return 141
    except OSError as error:  # a file that was named
        say(f"{error.filename or ''}: {error.strerror or error}", f"{PROGRAM} {words[0]}")
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)


def build_parser() -> Parser:
    """The parser of the command, in which each subcommand's `does` is what it runs."""
    from horoclone import __version__, optional, simulate, sockets
    from horoclone.launch import leaving

    parser = Parser(
        prog=PROGRAM,
        examples=(
            ("four ranks on this machine", f"{PROGRAM} run -np 4 python train.py"),
            ("what they do", f"{PROGRAM} top"),
            ("is this host fit for a job?", f"{PROGRAM} doctor"),
        ),
        description="Starts jobs, and looks at hosts, jobs and what jobs leave behind.",
    )
    parser.add_argument("-v", "-V", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands", parser_class=Parser)

    def command(name: str, does: Command, help: str, **options: Any) -> Parser:
        made: Parser = commands.add_parser(
            name, help=help, description=options.pop("description", help), **options
        )
        made.set_defaults(does=does)
        made.is_subcommand = True
        return made

    command("run", _run, "start a job; the same as horoclonerun (horoclone run --help)", add_help=False)
    top = command("top", _top, "show a running job: its ranks, steps, communication, stalls and losses")
    top.add_argument(
        "job", nargs="?", metavar="JOB", help="which one, where several run: its id or how that begins"
    )
    top.add_argument("--interval", type=seconds, metavar="S",
                     help="time between two looks, in seconds (default 1; 2 from 32 ranks on)")  # fmt: skip
    top.add_argument("--once", action="store_true", help="print it once, as without a terminal")
    leave = command("leave", leaving.leave, "ask workers of an elastic job on this host to leave it",
                    description=leaving.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    leaving.add_arguments(leave)
    doctor = command("doctor", _doctor, "examine this host: what a job would find, what is wrong, what to do")
    doctor.add_argument("--json", action="store_true", help="the findings for machines, all of them")
    doctor.add_argument(
        "--all", action="store_true", help="also what is of no use here, and which algorithms run"
    )
    debug = command(
        "debug", _debug, "compare the ranks' flight records; exit code 1 when the ranks' calls differ"
    )
    debug.add_argument(
        "paths", nargs="+", metavar="DIR|FILE", help="where HOROCLONE_RECORDER_DIR has put them"
    )
    debug.add_argument(
        "--torch",
        metavar="OUT",
        help="also write them as torch's flight recorder does, for `torchfrtrace OUT`",
    )
    timeline = command("timeline", _timeline, "merge the timelines of all ranks into one file, on one clock")
    timeline.add_argument("out", metavar="OUT", help="the file to write, for https://ui.perfetto.dev")
    timeline.add_argument(
        "paths", nargs="+", metavar="FILE", help="a rank's file (HOROCLONE_TIMELINE_ALL_RANKS=1)"
    )
    simulated = command(
        "simulate",
        simulate.show_sizes,
        "what agreement costs, and how long a step takes, at any size",
        examples=simulate.EXAMPLES,
    )
    simulate.add_arguments(simulated)
    looked = command(
        "sockets",
        sockets.show,
        "measure allreduces with and without levels of sockets and caches",
        examples=sockets.EXAMPLES,
    )
    sockets.add_arguments(looked)
    if optional.is_there("plan"):
        optional.load("plan.launching").add_command(command)
    command("check-build", _check_build, "list what is available, and why not the rest")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Only so that the list of commands has it: main() hands its words on before they are parsed."""
    raise LaunchError("horoclone run stands first: horoclone run -np 2 python train.py")


def seconds(text: str) -> float:
    value = number(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a time from 0.1 to 3600 seconds")
    return value


def _top(arguments: argparse.Namespace) -> int:
    from horoclone.launch.views import check_packages
    from horoclone.live import job

    check_packages("horoclone top")
    try:
        found = job.find(arguments.job)
    except job.NoJob as error:
        raise LaunchError(str(error), 1) from None
    from horoclone.live.top import screen

    return screen.show(found, arguments.interval, arguments.once)


def _doctor(arguments: argparse.Namespace) -> int:
    from horoclone.launch import doctor

    return doctor.main(arguments.json, arguments.all)


def _debug(arguments: argparse.Namespace) -> int:
    from horoclone.launch import debug, torch_flight

    code = debug.main(arguments.paths)
    if arguments.torch is not None:
        torch_flight.main(arguments.paths, arguments.torch)
    return code


def _timeline(arguments: argparse.Namespace) -> int:
    from horoclone.launch import timelines

    return timelines.main(arguments.out, arguments.paths)


def _check_build(arguments: argparse.Namespace) -> int:
    from horoclone.launch.inventory import check_build_table

    print(check_build_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
