"""The reaper: a tiny process that outlives its parent and, when that is gone, ends the registered process groups.

Run as a file (python -I -S reaper.py PARENT_PID), so it imports nothing of ours. stdin: lines "+pgid" or "-pgid".
"""

import os
import select
import signal
import sys
import time

_GENTLE_S = 1.0


def _wait_for_end(parent: int) -> set[int]:
    """Reads until the parent has closed the pipe or died; returns the groups that are still registered."""
    groups: set[int] = set()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    watched = -1
    try:  # somebody else may hold a copy of the pipe (a fork of the parent), so the parent itself is watched too
        watched = os.pidfd_open(parent)
        poll.register(watched, select.POLLIN)
    except (AttributeError, OSError):
        pass
    received = b""
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(5000)]
        if 0 in ready:
            data = os.read(0, 4096)
            received += data
            *lines, received = received.split(b"\n")
            for line in lines:
                (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
            if not data:
                return groups
        elif watched in ready or os.getppid() != parent:
            return groups


def _signal(groups: set[int], number: int) -> set[int]:
    """Signals every group; returns those that still have a process."""
    left = set()
    for group in groups:
        try:
            os.killpg(group, number)
            left.add(group)
        except (ProcessLookupError, PermissionError):
            pass
    return left


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    groups = _wait_for_end(int(sys.argv[1]))
    groups = _signal(groups, signal.SIGTERM)
    _signal(groups, signal.SIGCONT)  # a stopped process would keep its SIGTERM pending
    deadline = time.monotonic() + _GENTLE_S
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = _signal(groups, 0)  # the parent is gone, so nobody but init holds zombies, and not for long
    _signal(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
