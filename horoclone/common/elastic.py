"""Under Horovod's name: elastic jobs, which are not supported yet. Each name raises Unsupported on use."""

from horoclone.stand_ins import ELASTIC, stand_in

State = stand_in("hvd.elastic.State", ELASTIC)
ObjectState = stand_in("hvd.elastic.ObjectState", ELASTIC)
run_fn = stand_in("hvd.elastic.run_fn", ELASTIC)
notification_manager = stand_in("hvd.elastic.notification_manager", ELASTIC)

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
