"""What MkDocs calls while it builds the site (mkdocs.yml): pages from files outside of docs/.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages. Another file that a page links to becomes a page that shows it,
and so does a folder: the site has the links that the repository has, and needs no server for them.
Decisions are for those who change the code: they are no pages. A link to one in brackets is left out, else its text
stays.
llms.txt lists the pages with a sentence each, for programs that read (https://llmstxt.org).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository -> their pages; what lies in docs/ is a page of its own.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml", ".sh": "bash", ".h": "cpp", ".cc": "cpp"}

_FENCE = re.compile(r"^(`{3,}|~{3,})")
_TO_DECISION = r"\[([^\]]*)\]\((?:\.\./)*(?:docs/)?decisions/[^)]*\)"
_LINK = re.compile(r"(`+[^`]*`+)|\]\(([^)\s#]*)(#[^)\s]*)?\)")

_origins: dict[str, str] = {}  # page -> the file of the repository that it shows
_sentences: dict[str, str] = {}  # page -> its first sentence


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` applied to each line that is not in a fenced block of code."""
    lines, fence = [], ""
    for line in text.splitlines():
        found = _FENCE.match(line.strip())
        if found and (not fence or line.strip() == fence):
            fence = "" if fence else found[1]
        lines.append(line if fence or found else change(line))
    return "\n".join(lines) + "\n"


def links_of(text: str) -> Iterator[str]:
    """The targets of the relative links of a page, without their anchors."""
    found: list[str] = []

    def collect(line: str) -> str:
        found.extend(m[2] for m in _LINK.finditer(line) if m[2] and "://" not in m[2])
        return line

    outside_code(text, collect)
    yield from found


def page_of(name: str) -> str:
    """The page of a file or folder of the repository (a path from its root)."""
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"source/{name}" if name.endswith(".md") else f"source/{name}.md"


def shown(name: str) -> str:
    """A page that shows a file, or lists a folder. It is left out of the search."""
    place, head = ROOT / name, "---\nsearch:\n  exclude: true\n---\n"
    if place.suffix == ".md":
        return head + place.read_text()
    if place.is_dir():
        return f"{head}# {name}\n\n" + "\n".join(f"- `{one.name}`" for one in sorted(place.iterdir())) + "\n"
    return f"{head}# {name}\n\n````{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}````\n"


def first_sentence(text: str) -> str:
    """Of a page's first paragraph of prose, without marks; empty where there is none."""
    text = re.sub(r"^( *)(`{3,}).*?^\1\2$|<!--.*?-->", "", text, flags=re.M | re.S)
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        if re.match(r"[A-Za-z`*\[]", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("**", "")
            return re.split(r"(?<=[a-z`)])[.:] ", plain + " ")[0].strip().rstrip(".:")
    return ""


def llms_txt(name: str, about: str, nav: list[Any]) -> str:
    """The list of pages, in the form of llms.txt; nav: mkdocs.yml's."""
    parts = [f"# {name}\n\n> {about}\n"]

    def listed(entry: Any, title: str = "") -> None:
        if isinstance(entry, str):
            place = entry.removesuffix(".md") + ".html"
            sentence = _sentences.get(entry, "")
            parts.append(
                f"- [{title or entry.removesuffix('.md')}]({place})" + (f": {sentence}" if sentence else "")
            )
        elif isinstance(entry, list):
            for one in entry:
                listed(one)
        else:
            for inner, of in entry.items():
                if isinstance(of, list):
                    parts.append(f"\n## {inner}\n")
                listed(of, inner)

    listed(nav)
    return "\n".join(parts) + "\n"


def on_post_build(config: Any) -> None:
    """Writes llms.txt at the root of the site."""
    text = llms_txt(config["site_name"], config["site_description"], config["nav"])
    Path(config["site_dir"], "llms.txt").write_text(text)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of files outside of docs/: those of PAGES, and whatever a page links to, in turn."""
    _origins.clear()
    texts = {page: (ROOT / name).read_text() for name, page in PAGES.items()}
    _origins.update({page: name for name, page in PAGES.items()})
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    for file in files.documentation_pages():
        if file.src_uri not in _origins:
            _origins[file.src_uri] = f"docs/{file.src_uri}"
            texts[file.src_uri] = file.content_string
    to_read = list(texts)
    while to_read:
        page = to_read.pop()
        for target in links_of(texts[page]):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(_origins[page]), target))
            linked = page_of(name)
            if linked in _origins or name.startswith("docs/") or not (ROOT / name).exists():
                continue  # what does not exist stays a wrong link, which ends a strict build
            _origins[linked], texts[linked] = name, shown(name)
            files.append(File.generated(config, linked, content=texts[linked]))
            to_read.append(linked)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between their pages."""
    here = page.file.src_uri
    _sentences[here] = first_sentence(markdown)
    folder = posixpath.dirname(_origins[here])

    def change(found: re.Match[str]) -> str:
        target, anchor = found[2], found[3] or ""
        if not target or "://" in target:
            return found[0]
        name = posixpath.normpath(posixpath.join(folder, target))
        linked = page_of(name)
        return f"]({posixpath.relpath(linked, posixpath.dirname(here) or '.')}{anchor})"

    def changed(line: str) -> str:
        line = re.sub(_TO_DECISION, r"\1", re.sub(rf" ?\({_TO_DECISION}\)", "", line))
        return _LINK.sub(change, line)

    return outside_code(markdown, changed)
