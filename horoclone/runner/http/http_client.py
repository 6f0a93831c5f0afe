"""Under Horovod's name: values in a server of http_server. They travel as JSON, and nothing is unpickled.

Horovod sends pickles, which whoever reaches the server may have written.
"""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

REQUEST_TIMEOUT = 60  # seconds in which the server has to answer


def encode(value: Any) -> bytes:
    """What JSON holds, and bytes and tuples. TypeError for anything else."""
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """What encode() was given. ValueError for what it has not made."""
    try:
        return _value(json.loads(data))
    except (RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"no value of put_data_into_kvstore: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(
        f"put_data_into_kvstore: a value of the type {type(value).__name__} does not travel: only None, bool, int, "
        "float, str, bytes, and lists, tuples and dicts of them do, as nothing from the network is unpickled"
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if isinstance(plain, dict):
        ((kind, content),) = plain.items()
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "tuple":
            return tuple(_value(one) for one in content)
        if kind == "dict":
            return {_value(key): _value(one) for key, one in content}
        raise ValueError(f"no value of put_data_into_kvstore: {kind}")
    return plain


def read_data_from_kvstore(addr: str, port: int, scope: str, key: str) -> Any:
    """The value that was put there. RuntimeError when there is none, or the server does not answer."""
    try:
        with urlopen(f"http://{addr}:{port}/{scope}/{key}", timeout=REQUEST_TIMEOUT) as answer:
            return decode(answer.read())
    except (URLError, OSError, ValueError) as error:
        raise RuntimeError("Read data from KVStore server failed.", error) from error


def put_data_into_kvstore(addr: str, port: int, scope: str, key: str, value: Any) -> None:
    """RuntimeError when the server does not take it, TypeError for a value that cannot travel."""
    request = Request(f"http://{addr}:{port}/{scope}/{key}", data=encode(value), method="PUT")
    try:
        with urlopen(request, timeout=REQUEST_TIMEOUT):
            pass
    except (URLError, OSError) as error:
        raise RuntimeError("Put data input KVStore server failed.", error) from error
