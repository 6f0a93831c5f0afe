"""Under Horovod's name: a pipe of text between threads."""

from __future__ import annotations

import threading


class Pipe:
    """Holds the last text that was written: write() waits until it has been read, read() until there is one."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._changed = threading.Condition()
        self._closed = False

    def write(self, buf: str) -> None:
        """Returns when the text before this one has been read. RuntimeError when the pipe is, or becomes, closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._text is None or self._closed)
            if self._closed:
                raise RuntimeError("Pipe is closed")
            self._text = buf
            self._changed.notify_all()

    def read(self, length: int = -1) -> str | None:
        """At most `length` characters of what was written (-1: all of it); None when closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._text is not None or self._closed)
            if self._text is None:
                return None
            text, rest = self._text, ""
            if 0 < length < len(text):
                text, rest = text[:length], text[length:]
            self._text = rest or None
            self._changed.notify_all()
            return text

    def flush(self) -> None:
        """Nothing to do: what was written can be read at once."""

    def close(self) -> None:
        """Wakes everybody who waits. What was written before can still be read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
