"""Under Horovod's name: Python objects as base64 text, by cloudpickle. Load only what you have made yourself."""

from __future__ import annotations

import base64
from typing import Any


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """The object as text, or as bytes with to_ascii=False."""
    import cloudpickle

    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object that dumps_base64() was given. It runs code of whoever made the text."""
    import cloudpickle

    return cloudpickle.loads(base64.b64decode(encoded))
