"""Takes the place of compute-sanitizer where there is no GPU: knows the options of the real one and no others, runs the
program without any other open file, and says that it found nothing. Version 2025.3.1 (CUDA 13.0) is the model.

    python compute_sanitizer.py [options] PROGRAM [its options]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
NAMES_OF_KERNELS = ("kernel_name", "kne", "kernel_substring", "kns", "regex")


def kernel_name(text: str) -> str:
    key, _, value = text.partition("=")
    if key not in NAMES_OF_KERNELS or not value:
        raise argparse.ArgumentTypeError(f"one of {', '.join(NAMES_OF_KERNELS)}, then =VALUE")
    return text


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compute-sanitizer", allow_abbrev=False)
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--error-exitcode", type=int)
    parser.add_argument("--kernel-name", type=kernel_name, action="append")
    parser.add_argument("--launch-timeout", type=int)
    parser.add_argument("--report-api-errors", choices=("all", "explicit", "no"), default="explicit")
    parser.add_argument("--target-processes", choices=("application-only", "all"), default="all")
    parser.add_argument("--require-cuda-init", choices=("yes", "no"), default="yes")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.program:
        parser.error("no program")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    print("========= COMPUTE-SANITIZER", flush=True)
    code = subprocess.run(options.program, check=False, close_fds=True).returncode
    print("========= ERROR SUMMARY: 0 errors", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
