"""Our kernels on a GPU, each against NumPy to the bit, and how fast they move memory.

One process with CUDA's driver and NumPy alone, so what it says does not depend on torch, NCCL or a second rank. The
checks are those of tests/ptx, which see the same PTX on the host: what differs here is the assembler's or the GPU's.
HOROCLONE_CUDA_LIBRARY and HOROCLONE_NVRTC_LIBRARY name other libraries, as for the core.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import shared_with_tests

shared_with_tests.load("ptx/translator.py")
kernels = shared_with_tests.load("ptx/kernels.py")
checks = shared_with_tests.load("ptx/checks.py")

THREADS = 256  # of a block
ARENA = 256 << 20  # bytes for what one check uses
COMPUTE_MAJOR, COMPUTE_MINOR, PROCESSORS = 75, 76, 16  # attributes of a device
TIMED = 20  # launches between two looks at the clock
LARGEST, OF_PIECES = 1 << 30, 100 << 20  # bytes
BLOCKS_PER_PROCESSOR, BYTES_PER_THREAD = 8, 64  # of gpu_kernels.cc


class Gpu:
    """Device 0, through the driver: memory, and kernels that NVRTC has compiled for it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(os.environ.get("HOROCLONE_CUDA_LIBRARY") or "libcuda.so.1")
        context, self._module, self.stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuStreamCreateWithPriority", ctypes.byref(self.stream), 1, 0)
        major, minor, processors = (self._attribute(n) for n in (COMPUTE_MAJOR, COMPUTE_MINOR, PROCESSORS))
        self.capability, self.processors = 10 * major + minor, processors
        self.ptx = kernels.nvrtc_ptx(
            kernels.SOURCE, max(c for c in kernels.CAPABILITIES if c <= self.capability)
        )
        self.call("cuModuleLoadData", ctypes.byref(self._module), self.ptx.encode())
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._arena = self.allocate(ARENA)

    def call(self, name: str, *arguments: Any) -> None:
        if code := self._cuda[name](*arguments):
            raise SystemExit(f"{name} of the driver: error {code}")

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def allocate(self, bytes_: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(bytes_))
        return address.value

    def copy(self, to: int, source: int, bytes_: int) -> None:
        """Within the device."""
        size = ctypes.c_size_t(bytes_)
        self.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), size, self.stream)

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def start(self, name: str, arguments: ctypes.Structure, blocks: int, rows: int = 1) -> None:
        if name not in self._functions:
            self._functions[name] = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(self._functions[name]), self._module, name.encode())
        given = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        grid = blocks, rows, 1, THREADS, 1, 1, 0
        self.call("cuLaunchKernel", self._functions[name], *grid, self.stream, given, None)

    def launch(
        self, name: str, arguments: ctypes.Structure, buffers: list[Any], blocks: int = 2, rows: int = 1
    ) -> None:
        """As tests/ptx's Kernels: the buffers with what lies around them go to the GPU, at the same distance from 16
        bytes, and come back; words of the arguments that are their addresses become addresses there."""
        words = (ctypes.c_uint64 * (ctypes.sizeof(arguments) // 8)).from_buffer_copy(arguments)
        at, moved = self._arena, []
        for one in buffers:
            whole = one.whole
            at += (whole.ctypes.data - at) % 16
            moved.append(
                (ctypes.c_void_p(whole.ctypes.data), ctypes.c_uint64(at), ctypes.c_size_t(whole.nbytes))
            )
            self.call("cuMemcpyHtoDAsync_v2", moved[-1][1], moved[-1][0], moved[-1][2], self.stream)
            for i, word in enumerate(words):
                if one.at <= word <= one.at + len(one.bytes) and word:
                    words[i] = at + word - whole.ctypes.data
            at += whole.nbytes
        if at > self._arena + ARENA:
            raise SystemExit(f"{name}: a check needs {at - self._arena} bytes of the device")
        self.start(name, type(arguments).from_buffer_copy(words), blocks, rows)
        for host, there, size in moved:
            self.call("cuMemcpyDtoHAsync_v2", host, there, size, self.stream)
        self.wait()
        if not all(one.is_intact() for one in buffers):
            raise SystemExit(f"{name} writes beside its buffers")


def wrong(gpu: Gpu) -> tuple[int, list[str]]:
    """How many results were compared, and which differ."""
    compared, differ = 0, list[str]()
    for name in sorted(kernels.kernel_names()):
        count, found = checks.differences(gpu, name)
        compared, differ = compared + count, differ + found
    return compared, differ


def speeds(gpu: Gpu, largest: int) -> list[dict[str, Any]]:
    """Rows with what is moved and in GB/s, bytes read and written, the best of five."""
    a, b = gpu.allocate(largest), gpu.allocate(largest)
    rows = []

    def timed(what: str, bytes_: int, traffic: int, go: Callable[..., None], *given: Any) -> None:
        times = []
        for _ in range(6):
            gpu.wait()
            began = time.perf_counter()
            for _ in range(TIMED):
                go(*given)
            gpu.wait()
            times.append((time.perf_counter() - began) / TIMED)
        best = min(times[1:])
        rows.append({"what": what, "bytes": bytes_, "GB/s": traffic / best / 1e9, "us": best * 1e6})

    most = BLOCKS_PER_PROCESSOR * gpu.processors
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30):
        if size > largest:
            break
        blocks = max(1, min(most, -(-size // (BYTES_PER_THREAD * THREADS))))
        timed("copy of the driver", size, 2 * size, gpu.copy, b, a, size)
        pack = kernels.PackArguments(packed=b, factor=1, divisor=1)
        pack.piece[0] = kernels.Piece(a, size, 0)
        timed("hc_pack_bytes", size, 2 * size, gpu.start, "hc_pack_bytes", pack, blocks)
        for kind, item in (("f32", 4), ("bf16", 2), ("i8", 1)):
            of = kernels.ReduceArguments(
                count=size // item, pre=1, post=1, divisor=1, sources=2, destinations=1
            )
            of.reduce = [name for name, _ in checks.REDUCTIONS].index("Sum")
            of.inputs[:2], of.out[0] = [a, b], b
            timed(f"hc_reduce_{kind}", size, 3 * size, gpu.start, f"hc_reduce_{kind}", of, blocks)
    big = min(largest, OF_PIECES)
    pack = kernels.PackArguments(packed=b, factor=0.5, divisor=1)
    for i in range(160):
        pack.piece[i] = kernels.Piece(a, big // 4 if i == 0 else 64, 0)
    for beside, rows_ in (("alone", 1), ("beside 159 small ones", 160)):
        blocks = max(most // rows_, 1)
        timed(f"one piece {beside}", big, 2 * big, gpu.start, "hc_pack_i32_i32", pack, blocks, rows_)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument(
        "--largest", type=int, default=LARGEST, help="bytes of the largest size that is timed"
    )
    arguments = parser.parse_args(argv)
    gpu = Gpu()
    compared, differ = wrong(gpu)
    speed = speeds(gpu, arguments.largest)
    found = {"capability": gpu.capability, "compared": compared, "differ": differ, "speed": speed}
    for row in speed:
        print(f"{row['what']:<40}{row['bytes']:>12} bytes{row['GB/s']:>9.1f} GB/s{row['us']:>12.1f} us")
    print(f"{compared} results compared, {len(differ)} differ", *differ[:5], sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
