"""horoclone for Lightning 2: after `import horoclone.lightning`, `Trainer(strategy="horoclone")` trains on all ranks.

ImportError with the command that installs Lightning, where it is missing.
"""

try:
    import lightning.pytorch as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horoclone.lightning needs Lightning 2 (pip install lightning); without it use hvd.DistributedOptimizer in a "
        f"loop of your own. The import said: {error}"
    ) from error

from horoclone.lightning.callbacks import MetricsCallback
from horoclone.lightning.environment import HorocloneEnvironment
from horoclone.lightning.strategy import HorocloneStrategy

__all__ = ["HorocloneEnvironment", "HorocloneStrategy", "MetricsCallback"]
