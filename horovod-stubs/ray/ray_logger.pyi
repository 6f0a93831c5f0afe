from horoclone.ray.ray_logger import (
    configure as configure,
    log as log,
)
