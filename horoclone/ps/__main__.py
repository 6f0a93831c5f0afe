"""`python -m horoclone.ps`: one server of a parameter server, or the register that decides for all of them."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from horoclone import errors, failpoints
from horoclone.ps.register import open_register, serve_store
from horoclone.ps.server import Server

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def bytes_of(text: str) -> int:
    """ "512m", "64g" or a number."""
    number, unit = text.rstrip("kmgtKMGT"), text[len(text.rstrip("kmgtKMGT")) :].lower()
    if unit not in UNITS or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size; write 512m or 64g")
    return int(number) * UNITS[unit]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m horoclone.ps", description=__doc__)
    made.add_argument("--name", help="of this parameter server; workers ask for it by this name")
    made.add_argument("--store", metavar="HOST:PORT", help="the register (default: torchrun's store)")
    made.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the same secret as the workers' (default: HOROCLONE_SECRET_FILE, the job's)",
    )
    made.add_argument("--index", type=int, help="of this server (default: the rank that the launcher gives)")
    made.add_argument("--servers", type=int, help="how many there are (default: the launcher's size)")
    made.add_argument(
        "--replicas", type=int, default=2, choices=(1, 2), help="copies of each row (default 2)"
    )
    made.add_argument(
        "--memory",
        type=bytes_of,
        default=1 << 34,
        metavar="SIZE",
        help="for rows, as 512m or 64g (default 16g)",
    )
    made.add_argument(
        "--silence",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="a link that is silent for so long is given up",
    )
    made.add_argument("--interfaces", default="", help="network interfaces, comma list (default: all)")
    made.add_argument(
        "--ready-file",
        metavar="PATH",
        help="a file that is there while this server has all its copies: stop no other server before",
    )
    made.add_argument("--register", type=int, metavar="PORT", help="run the register here, and no server")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C. Exit code 1, with one line that says why, when it cannot; 2 for what is wrong in
    the command line or HOROCLONE_FAILPOINTS.
    """
    options = parser().parse_args(arguments)
    try:
        failpoints.check()  # no server has one, but the ranks beside it read the same variable
    except ValueError as error:
        print(f"horoclone.ps: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(format="horoclone.ps: %(message)s", level=logging.INFO)
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        if options.register is not None:
            store = serve_store(options.register)
            print(f"register at port {store.port}", flush=True)
            over.wait()
            return 0
        serve(options, over)
    except (errors.HorovodInternalError, ValueError, OSError) as error:
        print(f"horoclone.ps: {error}", file=sys.stderr)
        return 1
    return 0


def serve(options: argparse.Namespace, over: threading.Event) -> None:
    """One server, until `over`."""
    index, servers = options.index, options.servers
    environ = os.environ
    index = int(environ.get("HOROVOD_RANK") or environ.get("RANK") or 0) if index is None else index
    servers = (
        int(environ.get("HOROVOD_SIZE") or environ.get("WORLD_SIZE") or 1) if servers is None else servers
    )
    register = open_register(options.name or "", options.store, options.secret_file)
    server = Server(
        register,
        index,
        servers,
        replicas=min(options.replicas, servers),
        memory=options.memory,
        silence_s=options.silence,
        interfaces=options.interfaces,
    )
    print(f"server {index} of {servers} of {options.name} serves", flush=True)
    ready = Path(options.ready_file) if options.ready_file else None

    def tell(is_whole: bool) -> None:
        if ready is not None:
            ready.touch() if is_whole else ready.unlink(missing_ok=True)

    try:
        tell(False)  # a file of an earlier life
        server.run(over, tell)
    finally:
        server.stop()
        tell(False)


if __name__ == "__main__":
    sys.exit(main())
