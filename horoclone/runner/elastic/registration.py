"""Under Horovod's name: the registry of elastic jobs, the launcher's own. Its names raise Unsupported on use."""

from horoclone.stand_ins import ELASTIC, any_name

__getattr__ = any_name(__name__, ELASTIC)
