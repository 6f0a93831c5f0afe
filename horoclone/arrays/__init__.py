"""The operations on NumPy arrays: `import horoclone as hvd`, no framework needed.

They take anything that np.asarray takes; arrays that are not in native byte order are copied, and in-place functions
refuse them. collectives.py, rooted.py and messages.py document all other rules; functions.py collects their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horoclone.arrays import host_memory
from horoclone.arrays.functions import functions_over

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_functions = functions_over(host_memory)
globals().update(_functions)
__all__ = sorted(_functions)
