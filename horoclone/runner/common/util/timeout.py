"""Under Horovod's name: a time limit that several activities share."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    """The limit has passed. `message` is the text."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """timeout: seconds from now. message: a text with the place {activity}."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """TimeoutException that names the activity when the limit has passed."""
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip()
            stop = "" if text.endswith(".") else "."
            raise TimeoutException(f"{text}{stop} Timeout after {self._timeout} seconds.")
