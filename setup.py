"""For tools and habits that call setup.py: its commands are pip's, so what they build is what `pip install .` builds.

What that is stands in pyproject.toml. pip's settings hold here too: PIP_INDEX_URL says where the build backend comes
from, PIP_NO_BUILD_ISOLATION=0 takes the one that is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Command, Distribution, setup

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

os.chdir(Path(__file__).resolve().parent)
PYPROJECT = tomllib.loads(Path("pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
(VERSION,) = re.findall(r'^__version__ = "(.*)"', Path("horoclone/__init__.py").read_text(), re.M)
DIST_DIR = ("dist-dir=", "d", "where it goes (default: dist)")
WHERE = [("no-deps", "N", "leave out what it needs"), ("user", None, ""), ("prefix=", None, "")]


class Project(Distribution):
    def parse_config_files(self, *_: object, **__: object) -> None:
        """Reads nothing: setuptools before 77 refuses the license in pyproject.toml, and none finds the version."""


def pip(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", "pip", *arguments]).returncode
    if code != 0:
        raise SystemExit(code)


class Pip(Command):
    """A command of pip's, with options that pip has by the same names."""

    user_options: list[tuple[str, str | None, str]] = []
    arguments: tuple[str, ...] = ()

    def initialize_options(self) -> None:
        for name, _, _ in self.user_options:
            setattr(self, name.rstrip("=").replace("-", "_"), None)

    def finalize_options(self) -> None:
        given = {name: getattr(self, name.rstrip("=").replace("-", "_")) for name, _, _ in self.user_options}
        self.given = [f"--{name}{value if name[-1] == '=' else ''}" for name, value in given.items() if value]

    def run(self) -> None:
        pip(*self.arguments, *self.given)


class BdistWheel(Pip):
    description, user_options = "make a wheel: `pip wheel .`", [DIST_DIR]

    def run(self) -> None:
        pip("wheel", "--no-deps", "--wheel-dir", self.dist_dir or "dist", ".")


class Install(Pip):
    description, user_options = "install a copy: `pip install .`", [*WHERE, ("root=", None, "")]
    arguments = ("install", ".")


class Develop(Pip):
    description, user_options = "install the tree itself: `pip install -e .`", WHERE
    arguments = ("install", "--editable", ".")


class Sdist(Pip):
    description, user_options = "make the source package", [DIST_DIR]

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as backend:
            try:
                from scikit_build_core.build import build_sdist
            except ModuleNotFoundError:
                pip("install", "--quiet", "--target", backend, *PYPROJECT["build-system"]["requires"])
                sys.path.insert(0, backend)
                from scikit_build_core.build import build_sdist
            print(build_sdist(self.dist_dir or "dist"))


class Refused(Pip):
    description = "not here: see bdist_wheel, develop and install"
    user_options = [("inplace", "i", "")]
    build_base = "build"  # egg_info asks the command `build`

    def run(self) -> None:
        raise SystemExit(
            "setup.py builds everything at once: `bdist_wheel` makes a wheel, `develop` builds into the tree and "
            "installs that, `install` installs a copy."
        )


setup(
    distclass=Project,
    name=PROJECT["name"],
    version=VERSION,
    description=PROJECT["description"],
    license=PROJECT["license"],
    python_requires=PROJECT["requires-python"],
    install_requires=PROJECT["dependencies"],
    extras_require=PROJECT["optional-dependencies"],
    entry_points={"console_scripts": [f"{name} = {place}" for name, place in PROJECT["scripts"].items()]},
    packages=[],
    cmdclass={"bdist_wheel": BdistWheel, "develop": Develop, "install": Install, "sdist": Sdist}
    | dict.fromkeys(("build", "build_ext", "bdist", "bdist_egg"), Refused),
)
