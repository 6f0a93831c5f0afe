"""What a persistent bucket costs the host: processor time, and calls of CUDA's driver, by a library that counts them.

The counting library has every function that horoclone uses of the driver: it adds one and jumps on to the real one. It
is made from the list in csrc/device/cuda_api.h by the C compiler, for x86-64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SYMBOLS = Path(__file__).resolve().parent.parent / "csrc" / "device" / "cuda_api.h"
REAL = "HC_COUNTED_CUDA"  # which library the counting one passes calls on to; the driver's own name if unset
CHOICE = "HOROCLONE_CUDA_LIBRARY"

SOURCE = """
#include <dlfcn.h>
#include <stdlib.h>
enum { kCount = %(count)d };
static const char* const names[kCount] = {%(names)s};
void* hc_counted_target[kCount];
unsigned long hc_counted[kCount];
__attribute__((constructor)) static void find(void) {
  const char* path = getenv("%(real)s");
  void* real = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  for (int i = 0; real && i < kCount; ++i) hc_counted_target[i] = dlsym(real, names[i]);
}
%(functions)s
"""
FUNCTION = """asm(".globl %(name)s\\n.type %(name)s,@function\\n%(name)s:\\n"
    " lock incq hc_counted+%(at)d(%%rip)\\n jmp *hc_counted_target+%(at)d(%%rip)\\n");"""


def symbols(header: Path = SYMBOLS) -> list[str]:
    """The functions of the driver that the core loads, by the names that the driver exports."""
    return re.findall(r'^  X\(\w+, "(\w+)"', header.read_text(encoding="utf-8"), re.MULTILINE)


def source_of(names: list[str]) -> str:
    functions = "\n".join(FUNCTION % {"name": name, "at": 8 * i} for i, name in enumerate(names))
    quoted = ", ".join(f'"{name}"' for name in names)
    return SOURCE % {"count": len(names), "names": quoted, "real": REAL, "functions": functions}


def build(folder: Path) -> Path | str:
    """The counting library, or why there is none."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if platform.machine() != "x86_64" or compiler is None:
        return "calls of the driver are counted on x86-64 where there is a C compiler"
    folder.mkdir(parents=True, exist_ok=True)
    source, made = folder / "counted_cuda.c", folder / "libcounted_cuda.so"
    source.write_text(source_of(symbols()), encoding="utf-8")
    # Hidden names, or the jumps would have to go by a table of their own.
    command = [compiler, "-O2", "-fPIC", "-shared", "-Wl,-Bsymbolic", str(source), "-o", str(made), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return made if done.returncode == 0 else f"the counting library cannot be built: {done.stderr.strip()}"


class DriverCalls:
    """Counts of this process; start() before the first use of a GPU by horoclone."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._names = symbols()

    def start(self, folder: Path) -> None:
        """Puts the counting library between horoclone and the driver; says on stderr where that cannot be."""
        made = build(folder)
        if isinstance(made, str):
            print(made, file=sys.stderr)
            return
        os.environ[REAL] = os.environ.get(CHOICE, "")
        library = ctypes.CDLL(str(made))
        targets = (ctypes.c_void_p * len(self._names)).in_dll(library, "hc_counted_target")
        if absent := [name for name, target in zip(self._names, targets, strict=True) if not target]:
            print(
                f"calls of the driver are not counted: it has no {absent[0]}, or is not there",
                file=sys.stderr,
            )
            return
        self._library, os.environ[CHOICE] = library, str(made)

    def so_far(self) -> dict[str, int] | None:
        """How often each function was called; None where nothing is counted."""
        if self._library is None:
            return None
        counts = (ctypes.c_ulong * len(self._names)).in_dll(self._library, "hc_counted")
        return dict(zip(self._names, map(int, counts), strict=True))
