"""The `horoclone` command: run, doctor."""

from __future__ import annotations

import sys

from horoclone.launch.usage import say

_USAGE = """usage: horoclone run -np N [flags] python train.py ...   start a job (the same as horoclonerun)
       horoclone doctor [--json]                        examine this host
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
    if verb == "check-build" and not rest:
        from horoclone.launch import cli

        return cli.main(["--check-build"], "horoclone")
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


if __name__ == "__main__":
    sys.exit(main())
