"""What went wrong inside a program arrives as an exception of JAX's; this gives it its class back."""

from __future__ import annotations

import re

from horoclone import errors, tensor_names

_CLASSES = {
    "PeerLost": errors.PeerLost,
    "Mismatch": errors.Mismatch,
    "Timeout": errors.Timeout,
    "Aborted": errors.Aborted,
    "Unsupported": errors.Unsupported,
    "NotInitialized": errors.NotInitialized,
    "HorovodInternalError": errors.HorovodInternalError,
}
_FORM = re.compile(rf"[A-Z_]+: ({'|'.join(_CLASSES)}): (.*)", re.DOTALL)


def horovod_error_of(error: BaseException) -> errors.HorovodInternalError | None:
    """Returns the horoclone error inside an exception that JAX raised for a program, or None when it is another's.

    JAX raises jax.errors.JaxRuntimeError, or ValueError from its dispatch in C++; the text is the same.
    """
    found = _FORM.search(str(error))
    if not isinstance(error, (RuntimeError, ValueError)) or found is None:
        return None
    name, text = found[1], tensor_names.completed(found[2])
    if name == "PeerLost":
        rank = re.search(r"\brank (\d+)", text)
        return errors.PeerLost(text, int(rank.group(1)) if rank else -1)
    return _CLASSES[name](text)
