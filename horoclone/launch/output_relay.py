"""The output relay: a process that keeps the ranks' output readable when the launcher has died (--survive-launcher).

It holds the other ends of their pipes, so that no rank fails to write, and reads nothing while the launcher lives. Then
it carries their lines to the launcher's own stdout and stderr, and to the files of --output-filename, until the last
rank has ended. It drops what cannot be written.

Run as a file (python -I -S output_relay.py PARENT_PID), so it imports nothing of ours. stdin: a socket with messages
"+PID RANK FOLDER" and two descriptors, "-PID", and "." when the launcher ends in order.
"""

import os
import select
import selectors
import signal
import socket
import sys

_LONGEST_LINE = 1 << 16
_STREAMS = (1, 2)
_NAMES = {1: "stdout", 2: "stderr"}


class Pipe:
    """One rank's stdout or stderr."""

    def __init__(self, descriptor: int, stream: int, rank: str, folder: str) -> None:
        self.descriptor = descriptor
        self._stream, self._prefix = stream, f"[{rank}] ".encode()
        self._path = os.path.join(folder, _NAMES[stream]) if folder else ""
        self._line = b""

    def carry(self) -> bool:
        """Reads once. False at the end."""
        data = os.read(self.descriptor, 1 << 16)
        if self._path and data:
            _append(self._path, data)
        *lines, self._line = (self._line + data).split(b"\n")
        if self._line and (not data or len(self._line) >= _LONGEST_LINE):
            lines, self._line = [*lines, self._line], b""
        if lines:
            _write(self._stream, b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(data)


def _append(path: str, data: bytes) -> None:
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(data)
    except OSError:
        pass


def _write(stream: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(stream, data) :]
    except OSError:
        pass


def hold(parent: int) -> dict[int, list[Pipe]] | None:
    """Until the launcher ends: None, in order; else the pipes of the ranks that are left."""
    held: dict[int, list[Pipe]] = {}
    channel = socket.socket(fileno=0)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    try:  # somebody else may hold a copy of the socket (a fork of the launcher), so the launcher itself is watched too
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except (AttributeError, OSError):
        pass
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(5000)]
        if channel.fileno() not in ready:
            if ready or os.getppid() != parent:
                return held
            continue
        message, descriptors, _, _ = socket.recv_fds(channel, 8192, len(_STREAMS))
        if not message:
            return held
        if message == b".":
            return None
        pid, _, rest = message[1:].decode().partition(" ")
        if message.startswith(b"+"):
            rank, _, folder = rest.partition(" ")
            pairs = zip(descriptors, _STREAMS, strict=True)
            held[int(pid)] = [Pipe(descriptor, stream, rank, folder) for descriptor, stream in pairs]
        else:
            for pipe in held.pop(int(pid), []):
                os.close(pipe.descriptor)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    held = hold(int(sys.argv[1]))
    with selectors.DefaultSelector() as selector:
        for pipe in [one for pipes in (held or {}).values() for one in pipes]:
            selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.carry():
                    selector.unregister(key.fd)
                    os.close(key.fd)


if __name__ == "__main__":
    main()
