from horoclone.ray.utils import (
    detect_nics as detect_nics,
    map_blocking as map_blocking,
    nics_to_env_var as nics_to_env_var,
)
