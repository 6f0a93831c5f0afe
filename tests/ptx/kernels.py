"""Our kernels for GPUs as functions of this processor: compiled to PTX by NVIDIA's compilers, translated to C, and compiled again."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import translator

from horoclone.runtime.gpu_libraries import nvrtc_folders

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SOURCE = (CSRC / "device/kernels/kernels.cu").read_text()
HEADERS = ("device/kernel_arguments.h", "base/reductions.h")
CAPABILITIES = (80, 90, 100, 120)
LIST = re.compile(r"^HC_(?:KERNEL|PACKS)\((\w+),.*\n", re.MULTILINE)


def kernel_names() -> set[str]:
    names = set()
    for line in LIST.finditer(SOURCE):
        packs = line[0].startswith("HC_PACKS")
        names |= {f"hc_{way}_{line[1]}" for way in ("pack", "unpack")} if packs else {line[1]}
    return names


class Absent(Exception):
    """A compiler that is not installed here; says how to get it."""


def source_of(only: str = "", text: str = SOURCE) -> str:
    """The kernels whose line in the source's list begins with a name that `only` matches."""
    return LIST.sub(lambda line: line[0] if re.match(only, line[1]) else "", text)


def nvrtc_ptx(source: str, capability: int) -> str:
    """What NVRTC makes of it with the options of nvrtc_api.cc."""
    named = os.environ.get("HOROCLONE_NVRTC_LIBRARY")
    found = [Path(named)] if named else [Path(folder) / "libnvrtc.so.13" for folder in nvrtc_folders()]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        raise Absent("NVRTC 13 is not installed: pip install nvidia-cuda-nvrtc")
    options = re.findall(r'"(--[\w-]+(?:=[\w+]+)?)"', (CSRC / "device/nvrtc_api.cc").read_text())
    options = [
        f"--gpu-architecture=compute_{capability}",
        *(one for one in options if "architecture" not in one),
    ]
    assert "--fmad=false" in options, "what nvrtc_api.cc gives is no longer found"
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):  # which it looks for by name alone
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(library))

    def strings(*texts: str) -> ctypes.Array[ctypes.c_char_p]:
        return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

    def text_of(kind: str) -> str:
        size = ctypes.c_size_t()
        assert nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert nvrtc[f"nvrtcGet{kind}"](program, text) == 0
        return text.value.decode()

    program = ctypes.c_void_p()
    headers = strings(*((CSRC / name).read_text() for name in HEADERS))
    given = ctypes.byref(program), source.encode(), b"kernels.cu", len(HEADERS), headers, strings(*HEADERS)
    assert nvrtc.nvrtcCreateProgram(*given) == 0
    result = nvrtc.nvrtcCompileProgram(program, len(options), strings(*options))
    assert result == 0, text_of("ProgramLog")
    ptx = text_of("PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def nvcc() -> str | None:
    places = find_spec("nvidia")
    pips = [f"{root}/cu13/bin/nvcc" for root in (places.submodule_search_locations or [])] if places else []
    return shutil.which("nvcc") or next((path for path in pips if os.access(path, os.X_OK)), None)


def nvcc_ptx(source: str, capability: int) -> str:
    """What nvcc makes of it with the options of CMakeLists.txt."""
    compiler = nvcc()
    if compiler is None:
        raise Absent(
            "no nvcc: pip install --no-deps nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime"
        )
    assert "-fatbin -std=c++17 --threads 0 -fmad=false" in (ROOT / "CMakeLists.txt").read_text()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernels.cu").write_text(source)
        command = [compiler, "-ptx", "-std=c++17", "-fmad=false", f"-arch=compute_{capability}", f"-I{CSRC}"]
        done = subprocess.run(
            [*command, "kernels.cu"], cwd=folder, capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 0, done.stderr
        return (Path(folder) / "kernels.ptx").read_text()


PTX_OF = {"nvrtc": nvrtc_ptx, "nvcc": nvcc_ptx}


def built(ptx: str) -> Path:
    """The shared library of a module's kernels, which the driver's fake can load. Each different C text is compiled once."""
    code = translator.translated(ptx)
    # Each multiplication and each addition rounds. Code that is optimised would run in less, and be compiled in four times the time.
    compiler = [
        *(os.environ.get("CXX") or "g++").split(),
        *["-x", "c", "-", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-o"],
    ]
    folder = ROOT / "build" / "ptx"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{compiler}\n{code}".encode()).hexdigest()[:32]
    library = folder / f"{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".unfinished")
            done = subprocess.run(
                [*compiler, made, "-lm"], input=code, capture_output=True, text=True, timeout=360
            )
            assert done.returncode == 0, done.stderr[-3000:]
            made.rename(library)
    return library


U64, I64, F64, U32, I32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_double, ctypes.c_uint32, ctypes.c_int32


class Piece(ctypes.Structure):
    _fields_ = [("at", U64), ("count", U32), ("place", U32)]


class PackArguments(ctypes.Structure):
    _fields_ = [("packed", U64), ("factor", F64), ("divisor", I64), ("piece", Piece * 160)]


class ReduceArguments(ctypes.Structure):
    _fields_ = [
        ("inputs", U64 * 64), ("out", U64 * 64), ("count", U64), ("pre", F64), ("post", F64), ("divisor", I64),
        ("sources", I32), ("destinations", I32), ("reduce", ctypes.c_ubyte), ("scaled", ctypes.c_bool),
    ]  # fmt: skip


class Row(ctypes.Structure):
    _fields_ = [("a", U64), ("b", U64), ("count", U32), ("place", U32)]


class AdasumArguments(ctypes.Structure):
    _fields_ = [("sums", U64), ("row", Row * 160)]


class FoldArguments(ctypes.Structure):
    _fields_ = [("from_", U64), ("to", U64), ("lanes_in", U32), ("lanes_out", U32), ("lines", U32 * 2 * 500)]


GUARD = 64  # bytes around each buffer that no kernel may change


class Buffer:
    """Memory "of the device" with an address of `skip` above a multiple of 16."""

    def __init__(self, bytes_: int, skip: int = 0) -> None:
        self.whole = np.full(bytes_ + 2 * GUARD + 16, 0xA5, np.uint8)
        self._from = (-self.whole.ctypes.data) % 16 + GUARD + skip % 16
        self.bytes = self.whole[self._from : self._from + bytes_]
        self.at = self.whole.ctypes.data + self._from

    @classmethod
    def of(cls, values: np.ndarray, skip: int = 0) -> Buffer:
        made = cls(values.nbytes, skip)
        made.bytes[:] = np.frombuffer(values.tobytes(), np.uint8)
        return made

    def values(self, dtype: np.typing.DTypeLike, at: int = 0, count: int = -1) -> np.ndarray:
        return np.frombuffer(self.bytes.tobytes(), dtype, count, at)

    def is_intact(self) -> bool:
        after = self._from + len(self.bytes)
        return bool((self.whole[: self._from] == 0xA5).all() and (self.whole[after:] == 0xA5).all())


class Kernels:
    """launch() runs a kernel in blocks of 256 threads, and fails on an access that a GPU or compute-sanitizer would refuse."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._loaded = ctypes.CDLL(str(library))
        self._fault = ctypes.c_char_p.in_dll(self._loaded, "ptx_fault")
        self._memory = (U64 * 2 * 200).in_dll(self._loaded, "ptx_memory")
        self._memories = ctypes.c_uint.in_dll(self._loaded, "ptx_memories")

    def launch(
        self, name: str, arguments: ctypes.Structure, buffers: list[Buffer], blocks: int = 2, rows: int = 1
    ) -> None:
        size = ctypes.c_uint.in_dll(self._loaded, f"{name}_bytes").value
        assert size == ctypes.sizeof(arguments), f"{name} takes {size} bytes"
        for i, one in enumerate(buffers):
            self._memory[i][:] = one.at, one.at + len(one.bytes)
        self._memories.value, self._fault.value = len(buffers), None
        self._loaded.ptx_launch(self._loaded[name], ctypes.byref(arguments), blocks, rows)
        assert self._fault.value is None, f"{name}: {self._fault.value!r}"
        assert all(one.is_intact() for one in buffers), f"{name} writes beside its buffers"
