"""Under Horovod's name: the exceptions of horoclone.errors."""

from horoclone.errors import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
