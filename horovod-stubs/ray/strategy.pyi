from horoclone.ray.strategy import (
    BaseHorovodWorker as BaseHorovodWorker,
    BaseStrategy as BaseStrategy,
    ColocatedStrategy as ColocatedStrategy,
    GROUPS as GROUPS,
    HalfDead as HalfDead,
    PGStrategy as PGStrategy,
    Where as Where,
    create_placement_group as create_placement_group,
    is_own_fault as is_own_fault,
    logger as logger,
)
