"""Builds the native part with CMake; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if not sys.platform.startswith("linux"):
    sys.exit(
        f"horoclone runs on Linux only (it is built on memfd, futex and epoll), and this is {sys.platform}.\n"
        "On macOS or Windows use a Linux container or WSL 2."
    )

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NEEDED_CMAKE = (3, 18)


def version_of(program: str) -> tuple[int, ...]:
    """What `program --version` says, () if it is absent or does not run.

    Under build isolation a script of the surrounding environment can be on PATH and still be unable to start.
    """
    path = shutil.which(program)
    if path is None:
        return ()
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if done.returncode == 0 and found else ()


def missing_tools() -> list[str]:
    """Build requirements for what this machine has not; pip fetches them before it builds."""
    tools = []
    if version_of("cmake") < NEEDED_CMAKE:
        tools.append("cmake>=3.18")
    if not version_of("ninja") and not version_of("make"):
        tools.append("ninja")
    return tools


class Progress:
    """How much is compiled, from the lines of make or ninja: redrawn on a terminal, else a line for every fifth."""

    def __init__(self, path: str | None) -> None:
        self.file, self.percent = None, -1
        if path:
            try:
                self.file = open(path, "a", buffering=1)  # noqa: SIM115 - end() closes it
            except OSError:  # the build goes on without it
                return
            self.terminal = self.file.isatty()

    def saw(self, line: str) -> None:
        found = re.match(r"\[ *(\d+)(?:%|/(\d+))\]", line)
        if self.file is None or found is None:
            return
        percent = int(found[1]) * 100 // int(found[2]) if found[2] else int(found[1])
        step = 1 if self.terminal else 20
        if percent // step > self.percent // step:
            self.file.write(f"\r   compiled {percent} %" if self.terminal else f"   compiled {percent} %\n")
            self.percent = percent

    def end(self) -> None:
        if self.file is not None:
            self.file.write("\n" if self.terminal and self.percent >= 0 else "")
            self.file.close()


class CMakeBuild(build_ext):
    """build_ext by CMake: puts libhoroclone.so and _core into the package.

    The package of the wheel, or that of the source tree when the install is editable.
    """

    def run(self) -> None:
        in_place = bool(self.inplace or getattr(self, "editable_mode", False))
        self.prefix = ROOT if in_place else Path(self.build_lib).resolve()
        # An editable install is repeated often: its objects are kept in the tree. A wheel starts clean.
        # Both build folders lie equally deep: so ccache finds, by relative paths, what another copy compiled.
        build = Path(self.build_temp).resolve()
        if in_place:
            build = ROOT / "build" / f"editable-{sys.implementation.cache_tag}"
        self.configure(build)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        self.call(["cmake", "--build", str(build), "--parallel", jobs], show=True)
        self.call(["cmake", "--install", str(build), "--prefix", str(self.prefix), "--strip"])

    def configure(self, build: Path) -> None:
        import pybind11  # a build requirement: absent when setup.py is only asked for its requirements

        command = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            "-DPYBIND11_FINDPYTHON=ON",
            "-DHC_TESTS=OFF",
            "-DCMAKE_UNITY_BUILD=ON",  # a third of the time; `cmake` by hand compiles file by file
            "-DCMAKE_UNITY_BUILD_BATCH_SIZE=8",
        ]
        if nvcc := os.environ.get("HC_NVCC"):  # CUDA's compiler, where it is not on PATH; OFF: none
            command.append(f"-DHC_NVCC={nvcc}")
        if version_of("ninja"):
            command += ["-G", "Ninja"]
        if (build / "CMakeCache.txt").exists():
            if subprocess.run(command, capture_output=True).returncode == 0:
                return
            shutil.rmtree(build)  # made with tools of an earlier isolated build, which are gone
        build.mkdir(parents=True, exist_ok=True)
        self.call(command)

    def call(self, command: list[str], show: bool = False) -> None:
        """show: tells HC_BUILD_PROGRESS, a file, how far it is: pip shows nothing of what a build prints."""
        print("+", " ".join(command), flush=True)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as running:
            assert running.stdout is not None
            progress = Progress(os.environ.get("HC_BUILD_PROGRESS") if show else None)
            for line in running.stdout:
                print(line, end="", flush=True)
                progress.saw(line)
            progress.end()
        if running.returncode != 0:
            sys.exit("horoclone: the native build failed; the compiler's or CMake's message is above.")

    def native_files(self) -> list[Path]:
        return sorted(self.prefix.joinpath("horoclone").glob("*.so")) if hasattr(self, "prefix") else []

    def get_outputs(self) -> list[str]:
        return [] if self.inplace else [str(path) for path in self.native_files()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable build writes into the source tree itself

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*")) if path.is_file()]


setup(
    ext_modules=[Extension("horoclone._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=missing_tools(),
)
