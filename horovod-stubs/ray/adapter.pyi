from horoclone.ray.adapter import (
    Adapter as Adapter,
    BaseParams as BaseParams,
)
