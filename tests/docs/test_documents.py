"""The documents say what is so: their code runs, their links lead somewhere, their lists are complete."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from horoclone import errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_notebook_runs_in_a_kernel_and_is_that_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed").NotebookClient
    (block,) = python_blocks("docs/notebooks.md")
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)  # what a machine printed once is not kept
    assert block.strip() == f"{code[0].source}\n\n\n{code[1].source}".removesuffix("\nweights")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not see what other processes print
    client(book, timeout=120, kernel_name="python3").execute()
    weights, failed = (
        "".join(out.get("text") or out.data["text/plain"] for out in cell.outputs) for cell in code[1:]
    )
    assert "[0] loss 0.0" in weights and re.search(r"'weight': \[\[(0\.9|1\.0)", weights), weights
    assert re.search(r"^ValueError .*rank 1.*a bad batch", failed, re.M | re.S), failed


def test_the_first_script_trains_on_two_ranks(launch: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (block,) = python_blocks("docs/start.md")
    script = tmp_path / "train.py"
    script.write_text(block)
    command = [Path(sys.executable).with_name("horoclonerun"), "-np", "2", sys.executable, script]
    said = launch(command, timeout_s=120).stdout
    found = re.search(r"^\[0\] 2 ranks, loss (\d\.\d{4})$", said, re.M)
    assert found and float(found[1]) < 0.05, said


def test_the_page_on_launching_says_what_happens(launch: Any, tmp_path: Path) -> None:
    (block,) = python_blocks("docs/launching.md")
    script, config = tmp_path / "calls.py", tmp_path / "job.yaml"
    script.write_text(block)
    assert "[0, 10, 20]" in launch([sys.executable, script], env={"PYTHONPATH": str(ROOT)}).stdout
    (yaml,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "launching.md").read_text(), re.DOTALL)
    config.write_text(yaml)
    command = [sys.executable, "-m", "horoclone.launch.cli", "--config-file", config, "--print-config"]
    said = launch(command, env={"PYTHONPATH": str(ROOT)}).stdout
    rows = [line for line in said.splitlines() if "file" in line]
    assert len(rows) == 5 and re.search(r"HOROVOD_FUSION_THRESHOLD +67108864 ", said), said


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in t]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to {missing}"


def test_every_error_class_is_explained() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    names = [
        n
        for n, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.HorovodInternalError)
    ]
    assert len(names) >= 7
    assert not [name for name in names if f"`{name}`" not in text]


def test_files_that_the_documents_name_exist() -> None:
    missing = []
    for page in PAGES:
        for name in re.findall(
            r"`((?:csrc|horoclone|tests|docs|examples|benchmarks)/[\w./-]+\.\w+)`", page.read_text()
        ):
            if not (ROOT / name).exists():
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing, missing


def test_the_variables_that_the_documents_name_exist() -> None:
    known = set(
        re.findall(
            r"HORO(?:CLONE|VOD)_[A-Z0-9_]+",
            "".join(page.read_text() for page in (ROOT / "docs").glob("environment*.md")),
        )
    )
    text = "".join(
        (ROOT / page).read_text() for page in ("README.md", "docs/errors.md", "docs/architecture.md")
    )
    unknown = set(re.findall(r"HORO(?:CLONE|VOD)_[A-Z0-9]+[A-Z0-9_]*", text)) - known
    assert not unknown, f"not in docs/environment.md: {unknown}"


def test_the_keys_of_metrics_that_the_pages_name_exist(launch: Any) -> None:
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = set(re.findall(r"metrics\(\)\[\"(\w+)\"\]", text))
    command = [sys.executable, "-c", "import horoclone as hvd; hvd.init(); print(*hvd.metrics())"]
    found = set(launch(command).stdout.split())
    assert len(named) >= 4 and named <= found, named - found
