"""The `horoclone` command: run, leave, doctor, debug, timeline, simulate."""

from __future__ import annotations

import sys

from horoclone.launch.usage import say

_USAGE = """usage: horoclone run -np N [flags] python train.py ...   start a job (the same as horoclonerun)
       horoclone leave [--pid PID] [--wait S]           workers of an elastic job here leave it
       horoclone doctor [--json]                        examine this host
       horoclone debug DIR|FILE ...                     compare the ranks' flight records
       horoclone timeline OUT FILE FILE ...             merge the ranks' timelines into one
       horoclone simulate [--ranks 8,512 ...]           agreement and step time at any size
       horoclone check-build                            what is available, and why not the rest
       horoclone --version"""


def main(argv: list[str] | None = None) -> int:
    """Runs the `horoclone` command with `argv` (sys.argv[1:] by default) and returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb == "run":
        from horoclone.launch import cli

        return cli.main(rest, "horoclone run")
    if verb == "doctor" and set(rest) <= {"--json"}:
        from horoclone.launch import doctor

        try:
            return doctor.main("--json" in rest)
        except KeyboardInterrupt:
            return 130
    if verb == "leave":
        from horoclone.launch import leaving

        return leaving.main(rest)
    if verb == "simulate":
        from horoclone import simulate

        return simulate.main(rest)
    if verb == "check-build" and not rest:
        from horoclone.launch import cli

        return cli.main(["--check-build"], "horoclone")
    if (verb == "debug" and rest) or (verb == "timeline" and len(rest) > 1):
        return _read_files(verb, rest)
    if verb in ("--version", "-V", "version"):
        from horoclone import __version__

        print(__version__)
        return 0
    if verb in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    say(
        f"{' '.join(words)!r} is not something it can do\n{_USAGE}"
        if words
        else f"what shall it do?\n{_USAGE}",
        "horoclone",
    )
    return 2


def _read_files(verb: str, words: list[str]) -> int:
    """debug and timeline: what jobs have left behind. 2 for files that cannot be used."""
    from horoclone.launch import debug, timelines
    from horoclone.launch.usage import LaunchError

    try:
        return debug.main(words) if verb == "debug" else timelines.main(words[0], words[1:])
    except LaunchError as error:
        say(str(error), "horoclone")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
