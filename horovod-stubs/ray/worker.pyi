from horoclone.ray.worker import (
    BaseHorovodWorker as BaseHorovodWorker,
    Where as Where,
    here as here,
    leave as leave,
)
