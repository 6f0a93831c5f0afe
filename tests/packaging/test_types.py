"""What type checkers and editors see of a user's script: every name, its types, and the mistakes planted in it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from world import ran

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("user_script.txt").read_text()
WRONG = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# error")}


OF_OTHERS = (  # of torch's own annotations, and of names that are imported only to be looked at
    "reportUnknownMemberType", "reportUnknownVariableType", "reportUnusedImport", "reportMissingModuleSource"
)  # fmt: skip


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install {module}")


def test_the_stubs_are_what_the_package_has() -> None:
    pytest.importorskip("numpy")
    done = ran(sys.executable, ROOT / "docs" / "make_stubs.py", "--check")
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


def test_the_stub_has_every_name_of_the_package() -> None:
    import horoclone

    text = (ROOT / "horoclone" / "__init__.pyi").read_text()
    for module in re.findall(r"^from ([\w.]+) import \*$", text, re.M):
        text += "".join(f"{name}: \n" for name in importlib.import_module(module).__all__)
    for name in horoclone.__all__:
        assert re.search(rf"^(def {name}\(|    {name} as {name},|{name}: )", text, re.M), name


@pytest.mark.long(60)
@pytest.mark.parametrize("flags", [(), ("--strict",)], ids=["mypy", "mypy --strict"])
def test_mypy_finds_the_planted_mistakes_and_no_others(tmp_path: Path, flags: tuple[str, ...]) -> None:
    needs("mypy")
    needs("torch")
    (tmp_path / "user.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", *flags, "--cache-dir", str(tmp_path / "cache"), "user.py"]
    if flags:
        command += [
            "--allow-any-generics",
            "--allow-untyped-calls",
        ]  # np.ndarray alone; torch has untyped functions
    done = ran(*command, timeout=170, cwd=tmp_path)
    found = {int(number) for number in re.findall(r"^user\.py:(\d+): error:", done.stdout, re.M)}
    assert found == WRONG, f"{sorted(found ^ WRONG)}\n{done.stdout}{done.stderr}"


@pytest.mark.long(40)
def test_pyright_finds_the_planted_mistakes_and_no_others(tmp_path: Path) -> None:
    needs("basedpyright")
    needs("torch")
    (tmp_path / "user.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", **dict.fromkeys(OF_OTHERS, False)})
    )
    command = [
        sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", "user.py"
    ]  # fmt: skip
    done = ran(*command, timeout=170, cwd=tmp_path)
    answer = json.loads(done.stdout)
    errors = [one for one in answer["generalDiagnostics"] if one["severity"] == "error"]
    found = {one["range"]["start"]["line"] + 1 for one in errors}
    assert found == WRONG, f"{sorted(found ^ WRONG)}\n{done.stdout}{done.stderr}"


def test_an_editor_completes_the_names_and_shows_their_docstrings() -> None:
    needs("jedi")
    import jedi

    def completions(code: str) -> set[str]:
        return {one.name for one in jedi.Script(code).complete()}

    assert {"allreduce", "init", "rank", "PeerLost"} <= completions("import horoclone as hvd\nhvd.")
    assert {"allreduce", "size", "DistributedOptimizer"} <= completions("import horovod.torch as hvd\nhvd.")
    (shown,) = jedi.Script("import horoclone as hvd\nhvd.allreduce").help(2, 8)
    assert "Default op: Average" in shown.docstring()
