"""The site: built strictly, every link and anchor of its pages leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from world import ran

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(900), pytest.mark.long(60)]
# What a browser loads by itself; a link that a reader follows may lead elsewhere.
LOADED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") != "canonical":
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(mkdocs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Whatever asks for the network fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = ran(mkdocs, "build", "--strict", "--quiet", "--site-dir", folder, cwd=ROOT, env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}, timeout=170)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> Iterator[dict[Path, Page]]:
    yield {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    shutil.rmtree(site, ignore_errors=True)


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    wrong, followed = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links are relative to the server
            continue
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            followed += 1
            if not target.is_file() or not target.is_relative_to(site):
                wrong.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                wrong.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not wrong, wrong[:20]
    assert followed > 5000


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    elsewhere = [
        f"{path.relative_to(site)}: {what}"
        for path, page in pages.items()
        for what in page.loads
        if re.match(r"(?:https?:)?//", what)
    ]
    assert not elsewhere, elsewhere
    styles = [
        path for path in site.rglob("*.css") if re.search(r"url\(\s*['\"]?(?:https?:)?//", path.read_text())
    ]
    assert not styles, styles


def test_the_search_knows_every_page_and_every_public_function(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"]}
    assert len(found) > 500
    for location in ("elastic.html", "api/torch.html#horoclone.torch.DistributedOptimizer", "errors.html"):
        assert location in found, location
    assert not [location for location in found if location.startswith(("source/", "decisions/"))]
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "gradients" in texts["api/torch.html#horoclone.torch.DistributedOptimizer"]


def test_the_site_has_the_api_with_signatures_docstrings_and_source(site: Path) -> None:
    page = (site / "api" / "horoclone.html").read_text()
    for part in ('id="horoclone.allreduce"', "prescale_factor", "Source code in", "horoclone.Average"):
        assert part in page, part
    optimizer = (site / "api" / "torch.html").read_text()
    assert re.search(r"<li>(?:<p>)?<code>backward_passes_per_step</code>: passes", optimizer)
    assert 'href="../quorum.html"' in optimizer
    figures = (site / "performance.html").read_text()
    assert "figures/speed.svg" in figures and (site / "figures" / "speed.svg").is_file()


def test_llms_txt_lists_every_page_with_what_it_says(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\((\S+?)\)(: .+)?$", (site / "llms.txt").read_text(), re.M)
    assert len(listed) > 50
    assert not [page for page, _ in listed if not (site / page).is_file()]
    assert not [page for page, sentence in listed if not sentence and "api/" not in page]


UNEXPLAINED = """
import pathlib, re, sys
sys.path.insert(0, "docs")
import griffe
import site_api
package = griffe.load("horoclone", search_paths=["."], allow_inspection=False, extensions=griffe.load_extensions(site_api.ApiPages))
pages = "".join(page.read_text() for page in pathlib.Path("docs/api").glob("*.md"))
names = re.findall(r"^::: horoclone\\.(\\S+)", pages, re.M)
def says_nothing(name):
    text = package[name].docstring
    return text is None or not re.match("[A-Z`-]", text.value) or text.value.split()[0] in ("As", "Of", "Whether", "Where")
print(len(names), *filter(says_nothing, names))
"""


def test_every_name_of_the_api_has_a_docstring_that_begins_as_a_sentence(mkdocs: Path) -> None:
    done = ran(mkdocs.with_name("python"), "-c", UNEXPLAINED, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    number, *unexplained = done.stdout.split()
    assert int(number) > 200 and not unexplained, unexplained
