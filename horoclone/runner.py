"""Under Horovod's name: `horovod.runner.run` is horoclone.run. The launcher itself is horoclone.launch."""

from horoclone.launch.api import run

__all__ = ["run"]
