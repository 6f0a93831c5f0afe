"""A rank of the compute job: horoclonerun -np 4 python -m horoclone.tensorflow.data.compute_worker service.json

Rank 0 writes the file; the training job reads it with TfDataServiceConfig.read(file, wait_for_file_creation=True).
"""

from __future__ import annotations

import argparse
import secrets

from horoclone import runtime
from horoclone.bootstrap.rendezvous import Server
from horoclone.objects import broadcast_object
from horoclone.runtime import lifecycle
from horoclone.tensorflow.data.compute_service import JOB, TfDataServiceConfig, compute_worker_fn


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Serves until a training rank calls config.compute_client().shutdown(). ValueError for numbers that do not fit."""
    lifecycle.init()
    size = runtime.size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            f"Number of processes ({size}) must be a multiple of number of dispatchers ({dispatchers})."
        )
    server, config = None, None
    if runtime.rank() == 0:
        key = secrets.token_bytes(32)
        server = Server(key, JOB, 1, ["0.0.0.0:0"])
        config = TfDataServiceConfig(
            dispatchers, size // dispatchers, dispatcher_side, server.addresses, key, timeout
        )
        config.write(configfile)
    try:
        compute_worker_fn(broadcast_object(config))
    finally:
        if server is not None:
            server.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configfile", help="the file to write for the training job")
    parser.add_argument(
        "--dispatchers", type=int, default=1, help="1, or as many as there are training ranks"
    )
    parser.add_argument("--dispatcher-side", choices=("compute", "training"), default="compute")
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for each other")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)
