"""How a job ends: which process gets which signal, and when. Pure: time comes in, instructions come out."""

from __future__ import annotations

import signal
from typing import NamedTuple

FAILURE_WAIT_S = 5.0  # after one rank failed, the others notice by themselves and may say why
INTERRUPT_TERM_S, INTERRUPT_KILL_S = 1.0, 2.0  # Ctrl-C: everything is gone within 3 s
WAIT_IS_SAID_AFTER_S = 1.0  # a shorter wait needs no words
LEFTOVER_TERM_S, LEFTOVER_KILL_S = 2.0, 5.0  # what a rank's process left running in its group when it ended

FINISHED, FAILURE, INTERRUPT, TERMINATE, HANGUP, NO_READER, NOT_STARTED = range(7)
_EXIT_CODES = {INTERRUPT: 130, TERMINATE: 143, HANGUP: 129, NO_READER: 141}


class Order(NamedTuple):
    """Send `number` to every rank that is left: the process alone, or its group."""

    at_s: float
    number: int
    group: bool


class TerminationPolicy:
    """Collects the reasons to end; the first one names the exit code, a later one can only hasten the end."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._orders: list[Order] = []
        self._words: list[tuple[float, str]] = []  # when something is to be said about a wait
        self._interrupts = 0
        self.reason = FINISHED
        self.signalled_s: float | None = None  # since when ranks die of our doing

    @property
    def begun(self) -> bool:
        return self.reason != FINISHED

    @property
    def exit_code(self) -> int | None:
        """The code that the reason dictates; None: the ranks' own."""
        return _EXIT_CODES.get(self.reason)

    def fail(self, now: float) -> None:
        """A rank failed: 5 s for the others to find out, then SIGTERM, the grace period, SIGKILL."""
        if not self.begun:
            first = now + FAILURE_WAIT_S
            self._begin(FAILURE, [Order(first, signal.SIGTERM, False), *self._kill(first + self._grace_s)])
            after = WAIT_IS_SAID_AFTER_S
            rest = f"{FAILURE_WAIT_S - after:g} s"
            self._words = [
                (now + after, f"waiting for {{ranks}} to notice and say so; SIGTERM to who is left in {rest}")
            ]
            if self._grace_s > after:
                rest = f"{self._grace_s - after:g} s"
                self._words.append(
                    (first + after, f"SIGTERM was sent to {{ranks}}; SIGKILL in {rest} (--grace)")
                )

    def not_started(self, now: float) -> None:
        """Some rank could not even be started; nobody has work to save."""
        self._begin(NOT_STARTED, [Order(now, signal.SIGTERM, True), *self._kill(now + 2.0)])

    def interrupt(self, now: float) -> bool:
        """Ctrl-C; the second one kills at once. Returns whether this was the first."""
        self._interrupts += 1
        if self._interrupts > 1:
            self._begin(INTERRUPT, self._kill(now))
            return False
        self._begin(
            INTERRUPT,
            [
                Order(now, signal.SIGINT, False),
                Order(now + INTERRUPT_TERM_S, signal.SIGTERM, True),
                *self._kill(now + INTERRUPT_KILL_S),
            ],
        )
        return True

    def terminate(self, now: float, number: int) -> None:
        """SIGTERM or SIGHUP to us: forwarded, the grace period, SIGKILL. Again: nothing new."""
        reason = HANGUP if number == signal.SIGHUP else TERMINATE
        if self.reason not in (INTERRUPT, TERMINATE, HANGUP):
            self._begin(reason, [Order(now, number, False), *self._kill(now + self._grace_s)])

    def no_reader(self, now: float) -> None:
        """Our stdout or stderr was closed (`horoclonerun ... | head`)."""
        if not self.begun:
            self._begin(NO_READER, [Order(now, signal.SIGTERM, False), *self._kill(now + 2.0)])

    def due(self, now: float) -> list[Order]:
        """Orders whose time has come, in order, each once."""
        ready = [order for order in self._orders if order.at_s <= now]
        self._orders = [order for order in self._orders if order.at_s > now]
        if ready and self.signalled_s is None:
            self.signalled_s = now
        return ready

    def word(self, now: float) -> str | None:
        """What to say about a wait after a failure that has become noticeable, once; `{ranks}` are those that are left.
        None: nothing is due."""
        due = [text for at_s, text in self._words if at_s <= now]
        self._words = [] if self.reason != FAILURE else [one for one in self._words if one[0] > now]
        return due[-1] if due and self.reason == FAILURE else None

    def next_s(self) -> float | None:
        """When an order is due next."""
        return self._orders[0].at_s if self._orders else None

    def next_look_s(self) -> float | None:
        """When there is something to do next: an order, or a word."""
        return min(
            [*(order.at_s for order in self._orders[:1]), *(at_s for at_s, _ in self._words)], default=None
        )

    def leftover_delays(self) -> tuple[float, float]:
        """SIGTERM and SIGKILL for a group whose leader has ended, in seconds after that end."""
        return (
            (0.0, self._grace_s) if self.reason in (TERMINATE, HANGUP) else (LEFTOVER_TERM_S, LEFTOVER_KILL_S)
        )

    @staticmethod
    def _kill(at_s: float) -> list[Order]:
        return [Order(at_s, signal.SIGKILL, True)]

    def _begin(self, reason: int, orders: list[Order]) -> None:
        if not self.begun:
            self.reason = reason
        if not self._orders or orders[-1].at_s <= self._orders[-1].at_s:
            self._orders = orders
