"""Without building the site: every page is in its navigation, every public name on an API page, every anchor exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import yaml
from world import load

import horoclone
from horoclone import arrays, ops

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# The page that has each module's names, in the section whose heading names the module.
PAGE_OF = {
    "horoclone": "horoclone", "horoclone.torch": "torch", "horoclone.tensorflow": "tensorflow",
    "horoclone.keras": "keras", "horoclone.keras.callbacks": "keras", "horoclone.jax": "jax",
    "horoclone.cupy": "cupy", "horoclone.lightning": "lightning", "horoclone.checkpoint": "checkpoint",
    "horoclone.ray": "ray", "horoclone.spark": "spark", "horoclone.spark.torch": "spark",
    "horoclone.spark.keras": "spark", "horoclone.torch.elastic": "elastic", "horoclone.torch.elastic.state": "elastic",
    "horoclone.tensorflow.elastic": "elastic", "horoclone.keras.elastic": "elastic",
    "horoclone.jax.elastic": "elastic", "horoclone.checkpoint.torch.dcp": "checkpoint", "horoclone.checkpoint.jax.orbax": "checkpoint",
    "horoclone.torch.c10d": "torch", "horoclone.torch.torchft": "torch", "horoclone.data": "more",
    "horoclone.runner": "more", "horoclone.ps": "ps", "horoclone.ps.torch": "ps",
}  # fmt: skip
# Packages with an `__all__` whose names users find elsewhere.
ELSEWHERE = {
    "horoclone.arrays": "horoclone has its names",
    "horoclone.runtime": "horoclone has its names",
    "horoclone.tensorflow.keras": "horoclone.keras under an older name; tested below",
    "horoclone.torch.optimizer": "horoclone.torch has its name",
    "horoclone.torch.operations": "horoclone.torch has its names",
}


def module_at(place: Path) -> ModuleType:
    return load(place, place.stem)


def stubs() -> ModuleType:
    return module_at(DOCS / "make_stubs.py")


def public(module: str) -> set[str]:
    """What the `__all__` of a module lists; read from the source, so that no framework is needed."""
    if module == "horoclone":
        return set(horoclone.__all__)
    if module == "horoclone.cupy":  # its list is computed from the operations on arrays
        tree = ast.parse((ROOT / "horoclone" / "cupy" / "__init__.py").read_text())
        listed = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets)
        ]
        constants = {one.value for one in ast.walk(listed[0].value) if isinstance(one, ast.Constant)}
        return {str(one) for one in constants} | set(ops.__all__) | set(arrays.__all__)
    names: set[str] = stubs().exported(module.removeprefix("horoclone."))
    return names


def entries() -> dict[str, set[str]]:
    """The names that the API pages have, by module: entries of mkdocstrings, and links to the entry of another module."""
    found: dict[str, set[str]] = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        module = ""
        for line in page.read_text().splitlines():
            heading = re.match(r"#+ `(horoclone[\w.]*)`$", line)
            entry = re.match(r"::: (horoclone[\w.]*)\.(\w+)$", line)
            if heading:
                module = heading[1]
            elif entry:
                found.setdefault(entry[1], set()).add(entry[2])
            elif module:
                found.setdefault(module, set()).update(re.findall(r"\[`(\w+)`\][\[(]", line))
    return found


def shared(module: str) -> set[str]:
    """What a binding has from `horoclone`, whose page has the entries; cupy has the operations on arrays, too."""
    if module.endswith(".elastic") and module != "horoclone.torch.elastic":
        return public("horoclone.torch.elastic")
    if module not in (
        "horoclone.torch",
        "horoclone.tensorflow",
        "horoclone.keras",
        "horoclone.jax",
        "horoclone.cupy",
    ):
        return set()
    return public("horoclone") - (set() if module == "horoclone.cupy" else set(arrays.__all__))


def test_every_public_name_has_an_entry() -> None:
    found = entries()
    missing = {
        module: sorted(public(module) - found.get(module, set()) - shared(module)) for module in PAGE_OF
    }
    assert not {module: names for module, names in missing.items() if names}


def test_every_entry_is_a_public_name() -> None:
    known = {module: public(module) for module in PAGE_OF}
    unknown = {
        module: sorted(names - known[module] - {"SyncBatchNormalization", "horoclone"})
        for module, names in entries().items()
        if module in known
    }
    assert not {module: names for module, names in unknown.items() if names}


def test_the_older_name_of_keras_has_what_keras_has_and_two_names_more() -> None:
    of_its_own = entries()["horoclone.tensorflow.keras"]
    assert public("horoclone.tensorflow.keras") - public("horoclone.keras") <= of_its_own
    for module in ("callbacks", "elastic"):
        assert public(f"horoclone.tensorflow.keras.{module}") <= public(f"horoclone.keras.{module}")


def test_names_that_the_pages_use_are_public() -> None:
    """`hvd.name` in one of the bindings, and what is imported from a module that has an `__all__`."""
    known = {module: public(module) for module in PAGE_OF}
    names = set().union(*known.values())
    wrong, seen = [], 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        text = page.read_text()
        used = set(re.findall(r"\bhvd\.(\w+)", text))
        wrong += [f"{page.name}: hvd.{name}" for name in used - names]
        for module, listed in re.findall(r"^\s*from (horoclone[\w.]*) import (\w[\w, ]*)$", text, re.M):
            imported = set(re.findall(r"\w+", re.sub(r" as \w+", "", listed)))
            place = ROOT.joinpath(*module.split("."))
            missing = {
                name
                for name in imported - known.get(module, imported)
                if not (place / name).is_dir() and not (place / f"{name}.py").is_file()
            }
            wrong += [f"{page.name}: {module}.{name}" for name in missing]
        seen += len(used)
    assert not wrong, wrong
    assert seen > 150


def test_no_package_with_public_names_is_left_out() -> None:
    packages = [*(ROOT / "horoclone").glob("*/__init__.py"), *(ROOT / "horoclone").glob("*/*/__init__.py")]
    named = [
        ".".join(package.parent.relative_to(ROOT).parts)
        for package in packages
        if re.search(r"^__all__ = (?!\[\])", package.read_text(), re.M)
    ]
    assert len(named) > 10
    assert not [name for name in named if name not in PAGE_OF and name not in ELSEWHERE]


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function, which is of no interest here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def in_navigation(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry if isinstance(entry, list) else list(entry.values()) if isinstance(entry, dict) else []
    return [page for part in parts for page in in_navigation(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    listed = in_navigation(config["nav"])
    hook = (DOCS / "site_hook.py").read_text()
    made = set(re.findall(r'"[A-Z]+\.md": "(\w+\.md)"', hook))
    assert made == {"index.md", "contributing.md", "changelog.md"}
    written = {str(page.relative_to(DOCS)) for page in [*DOCS.glob("*.md"), *DOCS.glob("api/*.md")]}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | made


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and the usual viewers of repositories make them."""
    found: dict[str, int] = {}
    fence = ""
    for line in page.read_text().splitlines():
        mark = re.match(r"\s*(`{3,})", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        heading = re.match(r"#{1,6} (.*)", line) if not fence else None
        if heading:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
            if found[slug]:
                found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def test_anchors_exist() -> None:
    wrong, seen = [], 0
    for page in [*ROOT.glob("*.md"), *DOCS.glob("**/*.md")]:
        for target, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]*)\)", page.read_text()):
            if "://" in target:
                continue
            seen += 1
            linked = (page.parent / target) if target else page
            if linked.suffix == ".md" and linked.exists() and anchor not in slugs(linked):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not wrong, wrong
    assert seen > 30


def test_lists_begin_after_an_empty_line() -> None:
    """Viewers of repositories do without it; in the site the list would be part of the paragraph."""
    wrong = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")]:
        before, fence = "", False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            fence ^= line.lstrip().startswith("```")
            item = re.match(r"(?:[-*] |\d+\. )\S", line)
            follows = not before or re.match(r"\s|[-*] |\d+\. |#|>", before)
            in_a_line = re.search(r"[a-z]\. [*-] [A-Z]", line)  # an item that was wrapped into the one before
            if not fence and ((item and not follows) or in_a_line):
                wrong.append(f"{page.relative_to(ROOT)}:{number}: {line[:60]}")
            before = line
    assert not wrong, wrong


def test_the_figures_are_current() -> None:
    maker = module_at(DOCS / "make_figures.py")
    text = "".join(page.read_text() for page in [*DOCS.glob("*.md"), ROOT / "README.md"])
    for name, draw in maker.DRAWN.items():
        assert (DOCS / "figures" / name).read_text() == draw(), "run `make docs`"
        assert f"figures/{name})" in text, f"no page shows {name}"
