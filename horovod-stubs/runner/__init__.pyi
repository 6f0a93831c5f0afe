from horoclone.runner import (
    run as run,
)
