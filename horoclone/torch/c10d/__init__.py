"""The backend `horoclone` of torch.distributed; importing this package registers it."""

from horoclone.torch.c10d.group import HorocloneGroup
from horoclone.torch.c10d.registration import register

__all__ = ["HorocloneGroup", "register"]

register()
