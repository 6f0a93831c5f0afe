from horoclone.ray.worker import (
    BaseHorovodWorker as BaseHorovodWorker,
    Where as Where,
)
