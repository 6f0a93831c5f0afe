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
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
        self.call(["cmake", "--build", str(build), "--parallel", jobs])
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

    def call(self, command: list[str]) -> None:
        print("+", " ".join(command), flush=True)
        if subprocess.run(command).returncode != 0:
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
