"""Runs in a rank of horoclone.run: takes the function from inherited memory, calls it, leaves its value there.

Both descriptors come from the process that called run(), so what is unpickled here is what that caller passed. mpirun
hands down no descriptors; there they are files in a folder that only this user can read.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

VALUE, ERROR = b"V", b"E"
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def pack_function(path: list[str], pickled: bytes) -> bytes:
    """path: the caller's sys.path, so that modules beside its script are found."""
    head = json.dumps(path).encode()
    return len(head).to_bytes(4, "little") + head + pickled


def unpack_function(content: bytes) -> tuple[list[str], bytes]:
    end = 4 + int.from_bytes(content[:4], "little")
    return json.loads(content[4:end]), content[end:]


def _write(descriptor: int, kind: bytes, content: bytes) -> None:
    view = memoryview(kind + content)
    while view:
        view = view[os.write(descriptor, view) :]


def _pickled_error(error: BaseException) -> bytes:
    """(text of the traceback, the exception itself where it can be pickled)."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        return bytes(cloudpickle.dumps((text, error)))
    except Exception:
        return bytes(cloudpickle.dumps((text, None)))


def _descriptors() -> tuple[int, int]:
    """(the function's, the answer's)."""
    folder = os.environ.pop("HOROCLONE_FUNCTION_FOLDER", None)
    if folder is None:
        inherited = [int(one) for one in os.environ.pop("HOROCLONE_FUNCTION_FDS").split(",")]
        metrics = os.environ.get("HOROCLONE_RANK_METRICS", "").partition(":")[0]
        for descriptor in (
            *inherited,
            int(os.environ["HOROCLONE_SECRET_FD"]),
            *([int(metrics)] if metrics else ()),
        ):
            os.set_inheritable(descriptor, False)  # nothing that the function starts has a use for them
        source, target = inherited
        return source, target
    rank = next(os.environ[name] for name in _MPI_RANKS if name in os.environ)
    answer = os.path.join(folder, f"rank.{int(rank)}")
    return (
        os.open(os.path.join(folder, "function"), os.O_RDONLY | os.O_CLOEXEC),
        os.open(answer, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600),
    )


def main() -> int:
    import cloudpickle

    from horoclone.launch.process import read_memory

    source, target = _descriptors()
    path, pickled = unpack_function(read_memory(source))
    os.close(source)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
        value: Any = function(*args, **kwargs)
        _write(target, VALUE, cloudpickle.dumps(value))
        return 0
    except SystemExit as end:
        code = end.code
        if code is None or code == 0:
            _write(target, VALUE, cloudpickle.dumps(None))
        raise
    except BaseException as error:
        _write(target, ERROR, _pickled_error(error))
        raise  # the excepthook tells the others and the launcher


if __name__ == "__main__":
    sys.exit(main())
