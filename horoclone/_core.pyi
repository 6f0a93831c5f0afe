"""The native module (pybind11, csrc/python/module.cc). Bindings use it; users never do.

Numbers: ops, reductions and dtypes are the integers of horoclone.h (see horoclone.ops for the names).
Errors: the classes of horoclone.errors; ValueError for wrong arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

class Result:
    """Core-owned bytes of one result; supports the buffer protocol (1-d uint8, writable, zero copy) and keeps them alive."""

    data_ptr: int
    nbytes: int
    first_dimension: int
    rows_from: list[int]  # alltoall: rows received from each rank of the set
    join_rank: int  # join: the rank that joined last, else -1
    dtype: int  # scatter, receive: of what came, else -1
    shape: list[int]  # likewise
    source: int  # receive: world rank of the sender, else -1
    device: (
        int  # scatter, receive: of CUDA, where copy_result finds what came; -1: it is here, in host memory
    )
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Block:
    """Shared memory of this rank that every local rank sees (zeroed, 4 KiB aligned); supports the buffer protocol."""

    data_ptr: int
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class DeviceBlock:
    """Memory of a GPU, not written yet; freed with this object."""

    data_ptr: int
    nbytes: int
    __cuda_array_interface__: dict[str, object]

class FastPath:
    """The fast path of an allreduce in host memory, straight from tensors, and of its end. Only `call` waits.

    Takes what is plain: exactly of one of `kinds`, dense, contiguous, not empty, of a dtype that is reduced, in the
    process set `everybody`. Returns None (finish: NotImplemented) for all else and where something is wrong: then the
    caller goes through Runtime, which raises what is to be raised. Nothing has been submitted then.
    """

    def __init__(
        self,
        runtime: Runtime,
        kinds: tuple[type, ...],
        exchange: object,  # the capsule with DLPack's functions; None: the tensors have the buffer protocol
        everybody: object,
        pending: dict[
            int, Any
        ],  # handle -> target, or (target, source, None) where they differ; finish removes it
    ) -> None:
        """NotImplementedError: the capsule has no functions of DLPack 1 that read a tensor."""
    def collective(
        self,
        op: int,
        source: object,
        target: object,  # the source where it is overwritten; both None: a barrier
        reduce: int,
        root: int,  # of a message: the other rank
        tag: int,
        rows: object = None,  # alltoall: how source
        awaited_rows: object = None,  # and target are cut along their first dimension; None: in equal parts
        /,
    ) -> bool | int | None:
        """A blocking operation of torch.distributed. True: done. Else the handle of what failed, is not over in time,
        or has a result of the core's, because the ranks' sizes differ. In ranks of the world, with the tensors shown to
        the core as torch/c10d/group.py does."""
    def start_collective(
        self,
        op: int,
        source: object,
        target: object,
        reduce: int,
        root: int,
        tag: int,
        rows: object = None,
        awaited_rows: object = None,
        /,
    ) -> bool | int | None:
        """As collective, without the wait. True: done already. A handle: under way, and the caller keeps the tensors."""
    def end_collective(self, handle: int, /) -> bool:
        """Waits. True: it has succeeded, and the handle is released. False: Runtime.wait and result tell."""
    def set_limit(self, limit_s: float) -> None: ...  # of collective(); 0: none
    def start(
        self,
        source: object,
        target: object,  # shaped like the source; may be the same
        average: bool | None,  # plain: None
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: object,
        priority: int,
        /,
    ) -> int | None: ...
    def call(
        self,
        source: object,
        target: object,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: object,
        priority: int,
        /,
    ) -> Any:
        """As start, and waits: the target, or the handle of an operation that has failed.

        A signal's exception ends all operations first, when the core still reads and writes the tensors.
        """
    def start_group(
        self,
        sources: list[Any],
        targets: list[Any],
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: object,
        priority: int,
        /,
    ) -> int | None:
        """One operation, one handle."""
    def finish(self, handle: object, /) -> Any:
        """The output of an operation that was started here and has succeeded by now."""
    def given_elsewhere(self, handle: int, /) -> bool:
        """Whether `finish` has given its output to another thread lately."""

class Runtime:
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    address: int  # of the hc_runtime, for native libraries (horoclone.runtime.attached); valid as long as this object

    def __init__(self, settings: dict[str, bytes]) -> None:
        """Opens the listeners. settings: HOROCLONE_* / HOROVOD_* variables (os.environ filtered); unknown names are ignored."""
    def endpoint(self) -> bytes:
        """Opaque; every rank needs everybody's."""
    def connect(
        self,
        rank: int,
        endpoints: Sequence[bytes],
        secret: bytes,
        job: str,
        generation: int,
        timeout_s: float,
        mpi: tuple[str, int, int, bool] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """look: called every 50 ms; what it raises ends the attempt, and is raised."""
    def submit(
        self,
        op: int,
        name: str | None,
        data_in: int,  # address
        data_out: int,  # address; 0 = the core owns the result (always so for allgather, alltoall, reducescatter)
        shape: Sequence[int] | None,  # of the input; tuple or torch.Size is fastest; None: there is no tensor
        dtype: int,
        reduce: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        process_set: int = 0,
        splits: Sequence[int] | None = None,
        tag: int = 0,
        device: int = -1,  # CUDA's number of the GPU whose memory it is; -1: host memory
        stream: int = 0,  # on a GPU: the CUstream that produces the input
        priority: int = 0,  # allreduce: of what is ready the highest runs first
    ) -> int:
        """Queues one operation and returns its handle. The caller keeps the memory alive until it is done.

        barrier and join: data_in = data_out = 0, shape = (). scatter on other ranks than the root, and receive of
        whatever comes: shape = None. send, receive: root is the other rank (-1: from any), tag >= 0. An operation on
        a GPU is done when it has been enqueued.
        """
    def submit_group(
        self,
        op: int,
        name: str | None,
        data_in: Sequence[int],
        data_out: Sequence[int],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[int],
        reduce: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        process_set: int = 0,
        device: int = -1,
        stream: int = 0,
        priority: int = 0,
    ) -> int:
        """Several tensors as one operation (all or nothing), one handle."""
    def declare(
        self,
        names: Sequence[str],
        data: Sequence[int],  # addresses; reduced in place
        counts: Sequence[int],  # elements
        dtypes: Sequence[int],
        reduce: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        device: int = -1,  # the GPU that the buckets lie on
    ) -> int:
        """Declares an optimizer's buckets, the same on every rank; collective over the process set. Returns the set's id.

        The memory stays fixed until undeclare(). Where all ranks share memory and the buckets lie in Blocks their plan is persistent,
        between machines unless many of them are small (docs/decisions/buckets.md):
        submit_declared() starts a bucket without any message. Raises Mismatch when ranks declare different buckets.
        """
    def submit_declared(
        self, process_set: int, id: int, bucket: int, stream: int = 0, priority: int = 0
    ) -> int:
        """Like submit() of the declared bucket, under its declared name; returns a handle.

        stream: what fills a bucket on a GPU.
        """
    def undeclare(self, process_set: int, id: int) -> None: ...
    def offer_memory(self, free: Callable[[], object]) -> None:
        """`free` lets GPU memory go that the framework keeps for later: called within wait() when the core lacks some."""
    def trim_memory(self) -> None:
        """The core gives GPU memory back that it keeps for later: the framework lacks some."""
    def run(
        self,
        op: int,
        name: str | None,
        data_in: int,
        data_out: int,
        shape: Sequence[int] | None,  # as in submit
        dtype: int,
        reduce: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        process_set: int = 0,
        splits: Sequence[int] | None = None,
    ) -> Result | None:
        """submit + wait + release in one crossing; gives the core-owned result where data_out is 0 (not for a barrier)."""
    def poll(self, handle: int) -> bool: ...
    def wait(self, handle: int) -> None:
        """Drives the engine until done, without the GIL, in slices of 50 ms so that signals are served. Raises the operation's error.

        The handle stays valid until release(); an error releases it.
        """
    def advance(self, handle: int) -> bool:
        """Drives the engine without the GIL for as long as something moves, half a millisecond at most. Whether it
        is done."""
    def is_done_within(self, handle: int, limit_s: float) -> bool:
        """As wait(), for so long; what became of it wait() tells."""
    def result(self, handle: int, index: int = 0) -> Result: ...
    def release(self, handle: int) -> None: ...
    def stream_wait(self, handle: int, stream: int) -> None:
        """On a GPU, after wait(): the stream waits for the result, the host does not."""
    def copy_result(self, handle: int, index: int, to: int, nbytes: int, stream: int) -> None:
        """On a GPU, after wait(): copies the core-owned result there on that stream; result() tells its rows before."""
    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Collective over the world. Returns the id."""
    def remove_process_set(self, id: int) -> None: ...
    def allocate(self, nbytes: int) -> Block: ...
    def allocate_on_device(self, device: int, nbytes: int) -> DeviceBlock:
        """Memory of a GPU that NCCL knows once buckets in it are declared. Unsupported where this NCCL cannot do that."""
    def shares_memory(self) -> bool:
        """Whether every rank of the world maps this rank's arena."""
    def abort(self, text: str | bytes) -> None: ...
    def say_ending(self) -> None: ...
    def all_are_ending(self) -> bool: ...
    def shutdown(self, timeout_s: float = 5.0) -> None: ...
    def after_fork_child(self) -> None: ...
    def start_timeline(self, path: str | bytes, mark_cycles: bool = False) -> None: ...
    def stop_timeline(self) -> None: ...
    def timeline_span(self, name: str, from_s: float, seconds: float, args: str = "") -> None:
        """A span that is over; from_s: of time.monotonic(); args: the members of a JSON object."""
    def listen_to_timeline(self) -> None: ...  # until shutdown()
    def heard_of_timeline(self) -> str:
        """Waits; JSON lines, as hc_timeline_heard in horoclone_tools.h has them, "" at the end. One thread."""
    def watch_stack(self, signal: int, fd: int, thread: int, libraries: str) -> None:
        """Before connect(): `signal`, sent to the kernel's `thread`, makes it write its stack to the pipe that `fd` reads."""
    def flight_record(self, reason: str = "asked for") -> str: ...  # JSON
    def share_rank_metrics(
        self, fd: int, offset: int, program: bytes
    ) -> None: ...  # before connect; fd stays the caller's
    def rank_metrics(self) -> bytes: ...  # horoclone.live.rank_metrics decodes it
    def counters(self) -> str: ...  # JSON
    def describe(self) -> str: ...

# --- parameter servers: tables, their servers and their workers. Addresses are integers: ids int64, rows float32; the
# memory is the caller's, for the length of the call (ParameterClient.rows: for the life of the ParameterCall).

def table_state(spec: dict[str, Any]) -> int:
    """float32 behind the weights of a row: the optimizer's state. spec: the fields of hc_table_spec."""

def raise_code(code: int, text: str) -> None:
    """Raises what the core's hc_code stands for."""

class Table:
    """A table in this process, without a server. memory: bytes for rows."""

    def __init__(self, spec: dict[str, Any], memory: int) -> None: ...
    rows: int
    def pull(self, ids: int, n: int, out: int) -> None: ...
    def push(self, ids: int, n: int, gradients: int) -> None:
        """One step of the optimizer."""
    def assign(self, ids: int, n: int, rows: int, with_state: bool = False) -> None: ...

class ParameterServer:
    """Listens and serves from the moment it is made, on threads of its own; holds nothing before set_role()."""

    def __init__(
        self,
        index: int,
        partitions: int,
        secret: bytes,
        job: str,
        generation: int,
        memory: int,
        silence_s: float,
        interfaces: str,
    ) -> None: ...
    def endpoint(self) -> bytes: ...
    def set_role(self, partition: int, role: int) -> None:
        """hc_role. NONE drops the rows, PRIMARY keeps those of a backup."""
    def role(self, partition: int) -> int: ...
    def attach(self, partition: int, endpoint: bytes, index: int, generation: int, timeout_s: float) -> None:
        """Copies the partition to that server; from its return on every change waits for it, too."""
    def detach(self, partition: int) -> None: ...
    def next_event(self, timeout_s: float) -> tuple[int, int, int, str] | None:
        """(number, hc_event_kind, partition, text)"""
    def answer(self, number: int, code: int, text: str) -> None: ...
    def rows(self, partition: int, table: str, start: int, n: int, ids: int, out: int) -> tuple[int, int]:
        """(rows that were copied with their state, steps of the optimizer)"""
    def describe(self) -> str: ...  # JSON
    def stop(self) -> None: ...

class ParameterCall:
    """A call of a ParameterClient: knows which partitions have done it."""

    clocks: list[int]

class ParameterClient:
    """A worker's connections. One call at a time."""

    def __init__(
        self, rank: int, worker: int, partitions: int, secret: bytes, job: str, silence_s: float
    ) -> None: ...
    def connect(self, endpoint: bytes, index: int, generation: int, timeout_s: float) -> None: ...
    def is_connected(self, server: int) -> bool: ...
    def route(self, partition: int, server: int) -> None: ...
    def ask(self, server: int, question: str, timeout_s: float) -> str: ...
    def rows(
        self,
        verb: int,
        table: str,
        ids: int,
        n: int,
        floats: int,
        data_in: int = 0,
        data_out: int = 0,
        flags: int = 0,
    ) -> ParameterCall: ...
    def make_table(self, spec: dict[str, Any]) -> ParameterCall: ...
    def enter(self, table: str, rank: int) -> ParameterCall: ...
    def run(self, call: ParameterCall, limit_s: float) -> list[tuple[int, int, bool, int, str]]:
        """(partition, server, worth a retry, code, text) of what is not done. Waits without the GIL."""
    def close(self) -> None: ...

# Block quantisation of float32, as in horoclone.h: the first `count` of `shard` elements, addresses as integers (residual
# 0: none). ValueError when the numbers do not fit together; the memory behind the addresses is the caller's business.
def quantize(block: int, shard: int, count: int, data_in: int, residual: int, message: int) -> None: ...
def dequantize(
    block: int, shard: int, count: int, message: int, data_out: int, add: bool = False
) -> None: ...
def hash_memory(addresses: list[int], nbytes: list[int]) -> list[int]:
    """A 64-bit hash of each stretch of memory, which the caller keeps. Waits without the GIL."""

def simulate(
    numbers: dict[str, int], local: tuple[float, float, float], network: tuple[float, float, float]
) -> str:
    """One simulated step's agreement, as JSON. numbers: ranks, ranks_per_node, fanout, tensors, steps, processing;
    costs of a message in microseconds: send, latency, receive. ValueError for numbers out of range."""

def locality(cpus: list[int], folder: str = "") -> list[int]:
    """Socket, NUMA node and L3 cache of a process with these CPUs, each -1 where that is unknown or there are several.
    folder: in the form of /sys/devices/system."""

def levels_report(places: list[list[int]], bytes: int) -> str:
    """JSON: levels of ranks at these places, and what an allreduce moves between sockets, flat and levelled."""

def fail_at_exit() -> None:
    """The process, which is about to end with success, ends with exit code 1 once Python has finished. An exit handler
    of Python's cannot say so."""

def take_log(takes: bool) -> None:
    """Whether the core's lines go to log_lines() instead of stderr, of all runtimes."""

def log_warning(rank: int, text: bytes) -> None: ...  # a line of ours among them
def log_lines() -> str:
    """Waits for lines; JSON: [[level, rank or -1, Unix ns, text]], [] once nobody takes them."""

def knobs() -> str: ...  # JSON: [{name, type, default, help, horovod}]
def build_info() -> str: ...  # JSON: version, compiler, simd, features
def selection_report(settings: dict[str, str]) -> str:
    """JSON: by layout, rows {"operation", "from_bytes", "algorithm"}."""

def device_report(settings: dict[str, str]) -> str:
    """JSON: {"cuda": {"found", "file", "version", "devices"} or {"found": false, "reason"}, "nccl": the same and "where"}."""

def set_error_classes(classes: dict[int, Callable[[str, int], BaseException]]) -> None:
    """code -> factory(text, culprit); called once by horoclone.runtime.native_module."""
