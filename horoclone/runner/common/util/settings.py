"""Under Horovod's name: how a job is to be started, as scripts hand it to horovod.ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class BaseSettings:
    """num_proc: ranks. start_timeout: a runner.common.util.timeout.Timeout. nics: names of interfaces. key: bytes.

    The rest is named as horovodrun's flags.
    """

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = None
    start_timeout: Any = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Any = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


class Settings(BaseSettings):
    """With `hosts`: 'node-a:4,node-b:2'. It is the first argument; all others are given by name."""

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
