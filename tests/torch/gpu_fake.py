"""The framework's side of the fakes of CUDA and NCCL for torch: it takes the place of torch.cuda, so no GPU takes part.

"Device memory" is host memory that the fake has given out, so ordinary CPU tensors can lie in it; what asks torch
about CUDA (where is the tensor, which stream is current) asks the fake instead. Streams are threads with delays.
Used by tests/torch and, where it is tried without a GPU, by benchmarks/gpu.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

import torch

import horoclone.torch as hvd
from horoclone.torch import functions
from horoclone.torch.c10d.work import Future
from horoclone.torch.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barriers,
    broadcasting,
    functional,
    gpu,
    grouped,
    handles,
    messages,
    reduce_scatter,
    rooted,
    tensors,
    weighted,
)
from horoclone.torch.optimizer import adasum, buckets, gradient_bucket, reducer, sharded_state, sharding


class Fake:
    """The framework's side: a context, a stream, tensors in the fake's memory; takes the place of torch.cuda."""

    def __init__(self, device: int) -> None:
        self.cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
        self.device = device
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self.cuda.cuCtxPushCurrent_v2(context) == 0
        assert self.cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        self.stream = stream.value
        self.context = context.value
        self.everything: ctypes.CDLL | None = None  # see everywhere()
        self.placed = 0  # how often something was found on the GPU
        self.memory: list[tuple[int, int]] = []
        self.sources: list[torch.Tensor] = []
        self.capturing = False
        self.in_use: list[object] = []  # what was dropped before anybody had waited for it

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        size = max(1, values.numel() * values.element_size())
        pointer = ctypes.c_uint64()
        assert self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        self.memory.append((pointer.value, size))
        if not values.numel():
            return values.clone()
        buffer = (ctypes.c_char * size).from_address(pointer.value)
        made = torch.frombuffer(buffer, dtype=values.dtype, count=values.numel()).view(values.shape)
        return made.copy_(values)

    def late(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor whose values the stream has yet to write."""
        made, source = self.tensor(torch.zeros_like(values)), values.clone()
        self.sources.append(source)
        size = ctypes.c_size_t(source.numel() * source.element_size())
        pointers = ctypes.c_uint64(made.data_ptr()), ctypes.c_void_p(source.data_ptr())
        assert self.cuda.cuMemcpyHtoDAsync_v2(*pointers, size, ctypes.c_void_p(self.stream)) == 0
        return made

    def place_of(self, tensor: torch.Tensor) -> gpu.Place:
        if tensor.is_sparse:
            tensor = tensor._values()
        at = tensor.data_ptr()
        there = any(a <= at < a + n for a, n in self.memory)
        if self.everything is not None:
            there = there or bool(self.everything.fake_memory_holds(ctypes.c_void_p(at)))
        self.placed += there
        return (self.device, self.stream) if there else gpu.HOST

    @contextlib.contextmanager
    def everywhere(self):
        """Within it whatever torch allocates lies in the fake's memory (fake_memory.cc, built by the tests)."""
        if self.everything is None:
            self.everything = ctypes.CDLL(os.environ["HC_TEST_FAKE_MEMORY"])
            self.everything.fake_memory_start(
                ctypes.c_void_p(self.cuda._handle), ctypes.c_void_p(self.context)
            )
        self.everything.fake_memory_switch(1)
        try:
            yield
        finally:
            self.synchronize()
            self.everything.fake_memory_switch(0)

    def synchronize(self) -> None:
        if self.capturing:
            return
        popped = ctypes.c_void_p()  # this may be a thread that has never used the "GPU"
        assert self.cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(self.context)) == 0
        assert self.cuda.cuStreamSynchronize(ctypes.c_void_p(self.stream)) == 0
        assert self.cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0

    def occupy(self, seconds: float) -> None:
        """The stream goes on so much later."""
        job = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.in_use += [job(lambda _: time.sleep(seconds)), job(lambda _: None)]
        self.call("hc_fake_enqueue", ctypes.c_void_p(self.stream), self.in_use[-2], None, self.in_use[-1])

    def call(self, name: str, *arguments) -> None:
        assert getattr(self.cuda, name)(*arguments) == 0, name

    def capture(self, work):
        """What `work` gives the stream goes into a graph; returns a function that gives it to the stream again."""
        stream, graph, ready = ctypes.c_void_p(self.stream), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", stream, 0)
        self.capturing = True
        try:
            work()
        finally:
            self.capturing = False
            self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        self.call("cuGraphDestroy", graph)
        return lambda: self.call("cuGraphLaunch", ready, stream)

    def install(self) -> None:
        """CPU tensors are read at once, where CUDA's would be read behind the stream: so the host waits here."""
        follow = gpu.follow

        def follow_and_wait(runtime, handle, place):
            follow(runtime, handle, place)
            if place[0] >= 0:
                self.synchronize()

        rows_of = gpu.rows_of

        def rows_of_and_wait(*args):
            made = rows_of(*args)
            self.synchronize()
            return made

        number_of = tensors.number_of

        def shared_with(block, like, dtype):
            self.memory.append((block.data_ptr, block.nbytes))
            self.sources.append(block)  # real tensors keep it themselves
            buffer = (ctypes.c_char * block.nbytes).from_address(block.data_ptr)
            return torch.frombuffer(buffer, dtype=dtype)

        def number_with_place_of(tensor, name, takes_gpu=False):
            number = number_of(tensor, name)
            return number + tensors.ON_GPU * (takes_gpu and self.place_of(tensor) is not gpu.HOST)

        def memory_beside(like, shape, dtype):
            return self.tensor(torch.zeros(shape, dtype=dtype))

        arrived = gpu.arrived

        def arrived_and_wait(*args):
            made = arrived(*args)
            self.synchronize()
            return made

        empty_like = torch.empty_like

        def empty_beside(tensor, **options):
            made = empty_like(tensor, **options)
            there = "device" not in options and self.place_of(tensor) is not gpu.HOST
            return self.tensor(made) if there else made

        torch.empty_like = empty_beside
        gpu._stream_now = lambda device: self.stream

        fakes = {
            "place_of": self.place_of,
            "shared_with": shared_with,
            "is_capturing": lambda: self.capturing,
            "follow": follow_and_wait,
            "rows_of": rows_of_and_wait,
            "memory_beside": memory_beside,
            "memory_on": lambda device, shape, dtype: memory_beside(None, tuple(shape), dtype),
            "place_to_receive": lambda beside=None: (
                (self.device, self.stream) if beside is None else self.place_of(beside)
            ),
            "arrived": arrived_and_wait,
            "number_of": number_with_place_of,
            "side_stream": lambda place: None if place[0] < 0 else SideStream(self),
            "on_stream": lambda stream: contextlib.nullcontext(),
            "mark": lambda stream: stream,
            "stream_behind": lambda stream: stream and self.synchronize(),
            "Future": lambda work, place: Settled(self, work),
            "in_use_by": lambda stream, kept: self.in_use.append(kept),
        }
        self.fakes = fakes
        handles.tensor_exchange = None  # DLPack would tell the core where these tensors really are
        handles.table.kinds = ()
        for module in (
            gpu, adasum, all_gather, all_reduce, all_to_all, barriers, broadcasting, messages, reduce_scatter,
            handles, grouped, buckets, reducer, functional, functions, gradient_bucket, rooted, sharded_state,
            sharding, weighted
        ):  # fmt: skip
            self.patch(module)

    def patch(self, module) -> None:
        for name, fake in self.fakes.items():
            if hasattr(module, name):
                setattr(module, name, fake)


class SideStream:
    """The fake's only stream, which the host waits for before it touches what lies behind it."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.handle = fake.stream

    @property
    def cuda_stream(self) -> int:
        return self.handle


class Settled(Future):
    """Settled when the stream has come so far: who waits for it reads at once."""

    def __init__(self, fake: Fake, work) -> None:
        super().__init__(work, gpu.HOST)
        self.fake = fake

    def settle(self, outputs, error) -> None:
        self.fake.synchronize()
        super().settle(outputs, error)


def begin() -> Fake:
    hvd.init()
    fake = Fake(0 if "HC_TEST_ONE_GPU" in os.environ else hvd.local_rank())
    fake.install()
    return fake
