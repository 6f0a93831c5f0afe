"""Which call of backward a gradient's hook belongs to. Thread: any on which hooks run."""

from __future__ import annotations

import sys
import threading
from types import FrameType


def outermost_backward() -> FrameType | None:
    """Frame of the user's backward call (a reentrant checkpoint nests another one inside).

    The gradients of a GPU come on a thread of autograd's own, while the user's thread waits in that call.
    """
    if isinstance(threading.current_thread(), threading._DummyThread):
        here, stacks = threading.get_ident(), sys._current_frames()
        waiting = [frame for ident, top in stacks.items() if ident != here and (frame := _outermost(top))]
        if len(waiting) == 1:
            return waiting[0]
    return _outermost(sys._getframe(1))


def _outermost(frame: FrameType | None) -> FrameType | None:
    found = None
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.autograd":
            found = frame
        frame = frame.f_back
    return found
