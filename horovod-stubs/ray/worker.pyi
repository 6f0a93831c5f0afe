from horoclone.ray.worker import (
    BaseHorovodWorker as BaseHorovodWorker,
    Where as Where,
    here as here,
    kill_perhaps_later as kill_perhaps_later,
    leave as leave,
)
