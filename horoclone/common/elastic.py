"""Under Horovod's name: what the elastic states of all frameworks build on. See horoclone.elastic."""

from horoclone.elastic.notice import notification_manager
from horoclone.elastic.run import run_fn
from horoclone.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
