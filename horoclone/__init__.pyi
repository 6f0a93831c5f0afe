"""What `import horoclone as hvd` offers, for editors and type checkers. `make docs` writes this file."""

from collections.abc import Iterable
from typing import Any, overload

from numpy import int32
from numpy.typing import ArrayLike, NDArray

from horoclone.ops import ReduceOp

from horoclone.evaluation import *
from horoclone.ops import *
from horoclone.runtime.exported import *
from horoclone.runtime.observe import (
    flight_record as flight_record,
    metrics as metrics,
)
from horoclone.runtime.flat_metrics import (
    flat_metrics as flat_metrics,
)
from horoclone.errors import (
    Aborted as Aborted,
    HorovodInternalError as HorovodInternalError,
    HorovodVersionMismatchError as HorovodVersionMismatchError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    Mismatch as Mismatch,
    NotInitialized as NotInitialized,
    PeerLost as PeerLost,
    Timeout as Timeout,
    Unsupported as Unsupported,
)
from horoclone.objects import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_object_fn as broadcast_object_fn,
)
from horoclone.launch.api import (
    run as run,
)
from horoclone import checkpoint as checkpoint

__version__: str
HOROVOD_VERSION: str

def allreduce(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    weight: Any = None,
) -> NDArray[Any]:
    """Reduces arrays of one shape and dtype over all ranks; the same bits on every rank. Default op: Average.

    Integers average with truncation toward zero; bool reduces with Sum and Max = or, Min and
    Product = and. And, Or and Xor take the bits of integers and bools; they are not in Horovod. weight: how much
    this rank counts in the mean, sum(weight * array) / sum(weight): a number of 0 or more, given on every rank or
    on none. Also of the other forms; InvalidArgument on every rank where one's weight is negative or not finite, or
    all are 0."""

def allreduce_(
    array: NDArray[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    weight: Any = None,
) -> NDArray[Any]:
    """Does allreduce with the result in the array itself, which is returned."""

def allreduce_async(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    priority: int = 0,
    weight: Any = None,
) -> int:
    """Starts allreduce and returns a handle at once. Do not change the array before it is done.

    priority: of what all ranks have submitted, the highest runs first (docs/priority.md)."""

def allreduce_async_(
    array: NDArray[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    priority: int = 0,
    weight: Any = None,
) -> int:
    """Starts allreduce_ and returns a handle at once. Do not touch the array before it is done. priority: as
    there."""

def grouped_allreduce(
    arrays: Iterable[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    weight: Any = None,
) -> list[NDArray[Any]]:
    """Reduces several arrays as one operation: none of them before all are ready on every rank."""

def grouped_allreduce_(
    arrays: Iterable[NDArray[Any]],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    weight: Any = None,
) -> list[NDArray[Any]]:
    """Reduces as grouped_allreduce does, with the results in the arrays themselves."""

def grouped_allreduce_async(
    arrays: Iterable[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    weight: Any = None,
) -> int:
    """Starts grouped_allreduce and returns one handle for the group at once."""

def grouped_allreduce_async_(
    arrays: Iterable[NDArray[Any]],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    *,
    weight: Any = None,
) -> int:
    """Starts grouped_allreduce_ and returns one handle for the group at once. Arrays that share memory get their results in synchronize(), also where poll() says that they are done."""

def allgather(
    array: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Returns every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be
    one."""

def allgather_async(
    array: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts allgather and returns a handle at once."""

def grouped_allgather(
    arrays: Iterable[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> list[NDArray[Any]]:
    """Gathers several arrays over the ranks as one operation; see allgather."""

def grouped_allgather_async(
    arrays: Iterable[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts grouped_allgather and returns one handle for the group at once."""

def broadcast(
    array: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Returns rank root_rank's array on every rank, as a new array. root_rank is the world rank also in a process
    set."""

def broadcast_(
    array: NDArray[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Broadcasts as broadcast does, into the array itself, which is returned."""

def broadcast_async(
    array: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts broadcast and returns a handle at once."""

def broadcast_async_(
    array: NDArray[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts broadcast_ and returns a handle at once."""

@overload
def alltoall(
    array: ArrayLike,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Sends splits[r] rows to each rank r (equal shares without splits) and gives the rows received, in rank order.

    splits: integers in host memory. With them: (rows, received), the latter integers, one for each rank (an array
    of int32 with NumPy, a list with CuPy)."""
@overload
def alltoall(
    array: ArrayLike,
    splits: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> tuple[NDArray[Any], NDArray[int32]]: ...

def alltoall_async(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts alltoall and returns a handle at once."""

def reducescatter(
    array: ArrayLike,
    name: str | None = None,
    op: ReduceOp | int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray[Any]:
    """Reduces arrays of one shape and gives each rank its share of the rows, the first ranks one more if uneven."""

def reducescatter_async(
    array: ArrayLike,
    name: str | None = None,
    op: ReduceOp | int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts reducescatter and returns a handle at once."""

def grouped_reducescatter(
    arrays: Iterable[ArrayLike],
    name: str | None = None,
    op: ReduceOp | int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray[Any]]:
    """Does reducescatter on several arrays as one operation."""

def grouped_reducescatter_async(
    arrays: Iterable[ArrayLike],
    name: str | None = None,
    op: ReduceOp | int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts grouped_reducescatter and returns one handle for the group at once."""

def barrier(
    process_set: ProcessSet = ...,
) -> None:
    """Returns when every rank of the process set has called it."""

def join(
    device: int = -1,
) -> int:
    """Says that this rank has no more data: the others' allreduces go on with its identity elements, on GPU number
    `device` (-1: the current one) where arrays lie on GPUs. Returns, when every rank has joined, the rank that was
    last."""

def poll(
    handle: int,
) -> bool:
    """Returns whether synchronize(handle) would return at once."""

def synchronize(
    handle: int,
) -> Any:
    """Waits for an `_async` operation and returns what the blocking function would have. None for an unknown handle.

    Threads that wait for one handle each get the result; RuntimeError for one that comes after another has got it."""

def reduce(
    array: ArrayLike,
    root_rank: int,
    op: ReduceOp | int = 0,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> NDArray[Any] | None:
    """Returns the reduction of everybody's array on rank root_rank, as a new array; None on the others.

    Shapes and dtypes must be the same. op: any but Adasum. Over channels partial sums travel up
    a binomial tree; in shared memory every rank reduces a slice, which the root collects."""

def reduce_(
    array: NDArray[Any],
    root_rank: int,
    op: ReduceOp | int = 0,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Overwrites rank root_rank's array with the reduction; the others' stay as they are. Returns the array."""

def reduce_async(
    array: ArrayLike,
    root_rank: int,
    op: ReduceOp | int = 0,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> int:
    """Starts reduce and returns a handle at once."""

def reduce_async_(
    array: NDArray[Any],
    root_rank: int,
    op: ReduceOp | int = 0,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> int:
    """Starts reduce_ and returns a handle at once."""

def gather(
    array: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> NDArray[Any] | None:
    """Returns every rank's rows, in rank order, on rank root_rank; None on the others.

    Shapes may differ in the first dimension only; there must be one."""

def gather_async(
    array: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts gather and returns a handle at once."""

def scatter(
    array: ArrayLike | None,
    root_rank: int,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Returns this rank's share of the rows of rank root_rank's array: splits[r] rows for the r-th rank of the
    process set.

    Without splits (integers in host memory) the shares are equal, the first ranks get one row more if uneven. The
    root passes the array and the splits; what the others pass is ignored (None will do), and they
    get the root's dtype. From a GPU the shares go to the others' current GPUs."""

def scatter_async(
    array: ArrayLike | None,
    root_rank: int,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> int:
    """Starts scatter and returns a handle at once."""

def send(
    array: ArrayLike,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = ...,
) -> None:
    """Sends an array of any shape and dtype to rank dst (a world rank); from a GPU only to a GPU.

    Returns when the receiver has taken it. Mismatch, on both sides, when it receives into an array that does not
    fit; PeerLost when it dies; ValueError for a dst that is not in the process set or a negative tag."""

def recv(
    array: ArrayLike | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = ...,
) -> NDArray[Any]:
    """Receives from rank src (a world rank; None: from whoever sends first) into `array`, which is returned.

    The array must have the sender's dtype and number of elements. Without one a new array of the sender's shape and
    dtype is made (with CuPy on the GPU that this rank works on, also of what comes from host memory). Errors as
    those of send."""

def isend(
    array: ArrayLike,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = ...,
) -> int:
    """Starts send and returns a handle at once. Do not change the array before it is done."""

def irecv(
    array: ArrayLike | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = ...,
) -> int:
    """Starts recv and returns a handle at once. Do not touch the array before it is done."""
