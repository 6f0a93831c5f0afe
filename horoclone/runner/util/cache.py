"""Under Horovod's name: results that are kept in a file for some minutes. horoclonerun itself remembers nothing."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any


class Cache:
    """Results in `cache_folder`/cache.json, forgotten after so many minutes or when parameters_hash has changed.

    The file holds JSON, so a result is what JSON can hold. Threads may share one.
    """

    def __init__(
        self, cache_folder: str, cache_staleness_threshold_in_minutes: float, parameters_hash: str
    ) -> None:
        self._path = os.path.join(cache_folder, "cache.json")
        self._limit_s = cache_staleness_threshold_in_minutes * 60.0
        self._parameters = parameters_hash
        self._lock = threading.Lock()
        os.makedirs(cache_folder, mode=0o700, exist_ok=True)
        self._content: dict[str, Any] = {}
        try:
            with open(self._path, encoding="utf-8") as file:
                content = json.load(file)
            if isinstance(content, dict) and content.get("parameters") == parameters_hash:
                self._content = dict(content["results"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no cache yet, or none of ours: begin a new one

    def get(self, key: Any) -> Any:
        """The result that was put under this key, None when there is none or it is too old."""
        with self._lock:
            value, at_s = self._content.get(repr(key), (None, 0.0))
        return value if time.time() - at_s <= self._limit_s else None

    def put(self, key: Any, val: Any) -> None:
        """Keeps a result and writes the file anew, whole or not at all. TypeError for what JSON cannot hold."""
        with self._lock:
            content = {**self._content, repr(key): (val, time.time())}
            text = json.dumps({"parameters": self._parameters, "results": content})
            self._content = content
            with tempfile.NamedTemporaryFile(
                "w", dir=os.path.dirname(self._path), delete=False, encoding="utf-8"
            ) as file:
                file.write(text)
            os.replace(file.name, self._path)


def use_cache() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a call with fn_cache=Cache(...) is answered from it, if it can be. A result None is not kept."""

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def answer(*args: Any, fn_cache: Cache | None = None, **kwargs: Any) -> Any:
            if fn_cache is None:
                return func(*args, **kwargs)
            key = (func.__name__, args, sorted(kwargs.items()))
            value = fn_cache.get(key)
            if value is None:
                value = func(*args, **kwargs)
                if value is not None:
                    fn_cache.put(key, value)
            return value

        return answer

    return decorate
