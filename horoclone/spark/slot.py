"""The process beside a Spark task that starts its rank: launch/remote.py, with a connection to the driver as its stdin
and stdout. Secret and function are inherited as memory (executor.py), so that neither crosses the network again.
"""

from __future__ import annotations

import os
import signal
import sys

from horoclone.launch.api import RANK
from horoclone.launch.link import package_home
from horoclone.launch.process import read_memory
from horoclone.launch.remote import Given, Remote
from horoclone.spark.executor import FUNCTION_FD, OWN_FOLDER, OWN_PYTHON, SECRET_FD


def main() -> int:
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGTERM,
    ):  # the end of the connection is what is acted on
        signal.signal(number, lambda *_: None)
    secret, function = int(os.environ.pop(SECRET_FD)), int(os.environ.pop(FUNCTION_FD))
    command = [os.environ.pop(OWN_PYTHON), "-c", RANK, package_home()]
    given = Given(read_memory(secret), read_memory(function), command, os.environ.pop(OWN_FOLDER))
    os.close(secret)
    os.close(function)
    return Remote(given).serve()


if __name__ == "__main__":
    sys.exit(main())
