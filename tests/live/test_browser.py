"""The dashboard in a real browser: what it shows is what the ranks say, for eyes, keyboards and both themes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import browser
import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZE = 8
FIGURES = os.environ.get("HOROCLONE_TEST_FIGURES") == "1"  # write the picture, too: needs root
TAB, ENTER, ESCAPE = ("Tab", 9), ("Enter", 13, "\r"), ("Escape", 27)

pytestmark = [
    pytest.mark.skipif(browser.find() is None, reason="no Chromium (Debian: apt-get install chromium)"),
    pytest.mark.long(60),
]

# [[name, calls, bytes], ...] and [[rank, state, bytes], ...], in full, from the titles of the cells
OPERATIONS = """[...document.querySelectorAll('#operations tbody tr')].map((row) =>
  [row.dataset.operation, Number(row.cells[1].title), Number(row.cells[2].title)])"""
RANKS = """[...document.querySelectorAll('#table tbody tr')].map((row) =>
  [Number(row.dataset.rank), row.dataset.state, Number(row.cells[10].title)])"""
WHERE = (
    "(() => { const at = document.activeElement; return at.id || at.textContent.trim() || at.tagName; })()"
)
CONTRASTS = """(() => {
  const light = (text) => { const c = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
  const ground = (at) => { while (at && /rgba\\(.*, 0\\)|transparent/.test(getComputedStyle(at).backgroundColor)) at = at.parentElement;
    return getComputedStyle(at).backgroundColor; };
  return [...document.querySelectorAll('#grid button, dt, dd, th, td, figcaption, #connection, #legend, #histogram span')]
    .map((at) => { const a = light(getComputedStyle(at).color), b = light(ground(at));
      return [at.id || at.className || at.tagName, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; })
    .filter(([, ratio]) => ratio < 4.5);
})()"""


COLOUR = (
    "(() => { const i = document.createElement('i'); i.style.color = 'var(--%s)'; document.body.append(i);"
    " const found = getComputedStyle(i).color; i.remove(); return found; })()"
)


def tile(rank: int) -> str:
    return f"document.querySelector('#grid button[data-rank=\"{rank}\"]')"


def picture(page: Any, folder: Path, name: str) -> None:
    """What the page shows now, and in the documents where that is asked for."""
    path = folder / f"{name}.png"
    page.screenshot(path)
    assert path.stat().st_size > 10_000
    if FIGURES:
        shutil.copy(path, ROOT / f"docs/figures/{name}.png")


def shows(operation: str, count: int) -> str:
    return f"{OPERATIONS}.some((one) => one[0] === '{operation}' && one[1] === {count})"


@pytest.fixture(scope="module")
def job(start_watched: Any) -> Any:
    # The picture in the documents has a host of no particular name.
    named = ("unshare", "--uts", "sh", "-c", 'hostname node-a; exec "$@"', "sh") if FIGURES else ()
    made = start_watched(SIZE, flags=("--why",), before=named)
    made.wait_until_calm(120)
    return made


@pytest.fixture(scope="module")
def page(job: Any) -> Any:
    with browser.browser(browser.find()) as made:
        made.set_size(1280, 1300)
        made.open(job.dashboard_url)
        made.wait_until(f"document.querySelectorAll('#grid button').length === {SIZE}")
        yield made


def test_the_values_on_the_page_are_those_of_the_metrics(job: Any, page: Any) -> None:
    own = [job.metrics_of(rank)["by_operation"] for rank in range(SIZE)]
    expected = {kind: [sum(one[kind][what] for one in own) for what in ("count", "bytes")] for kind in own[0]}
    page.wait_until(shows("broadcast", expected["broadcast"][0]))
    shown = {name: [count, size] for name, count, size in page.ask(OPERATIONS)}
    assert shown == expected
    scraped = {
        kind: [
            job.value("horoclone_operations", "horoclone_operations_total", operation=kind),
            job.value("horoclone_operation_bytes", "horoclone_operation_bytes_total", operation=kind),
        ]
        for kind in expected
    }
    assert scraped == expected
    ranks = page.ask(RANKS)
    assert ranks == [
        [rank, "running", sum(one["bytes"] for one in own[rank].values())] for rank in range(SIZE)
    ]
    assert page.ask("document.getElementById('sum-ranks').textContent") == f"{SIZE} of {SIZE}"
    assert page.ask("document.getElementById('sum-slowest').textContent") == "rank 1"
    counts = page.ask("document.getElementById('histogram').getAttribute('aria-label')")
    which = page.ask("document.getElementById('which').value")
    assert sum(int(one) for one in re.findall(r"(\d+) (?:to|longer)", counts)) == expected[which][0]


def test_everything_is_reached_with_the_keyboard(job: Any, page: Any) -> None:
    page.ask("document.activeElement.blur()")
    passed = []
    for _ in range(SIZE + 40):
        page.press(*TAB)
        passed.append(page.ask(WHERE))
        outline = page.ask("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"{passed[-1]} does not show that it has the focus"
        if passed[-1] == "Last operation":
            break
    assert passed[0] == "To the ranks" and "theme" in passed and "which" in passed and "events" in passed
    assert all(any(one.startswith(str(rank)) for one in passed) for rank in range(SIZE)), passed
    assert {"Rank", "Host", "State", "Last operation"} <= set(passed), passed
    page.ask("document.querySelector('#grid button').focus()")
    page.press("ArrowRight", 39)
    page.press(*ENTER)
    own = job.metrics_of(1)["by_operation"]
    page.wait_until("document.querySelector('.whose').textContent === 'rank 1'")
    page.wait_until(shows("broadcast", own["broadcast"]["count"]))
    assert {name: size for name, _, size in page.ask(OPERATIONS)} == {
        k: one["bytes"] for k, one in own.items()
    }
    page.press(*ESCAPE)
    page.wait_until(shows("broadcast", SIZE * own["broadcast"]["count"]))
    page.ask("[...document.querySelectorAll('th button')].find((one) => one.textContent === 'Rank').focus()")
    page.press(*ENTER)
    assert [rank for rank, _, _ in page.ask(RANKS)] == list(reversed(range(SIZE)))
    page.press(*ENTER)


def test_light_and_dark_follow_the_system_and_the_button(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        seen[scheme] = page.ask(ground)
        assert page.ask(CONTRASTS) == [], f"hard to read where it is {scheme}"
    assert seen["light"] != seen["dark"]
    page.ask("document.getElementById('theme').focus()")
    for name in ("light", "dark"):  # against a dark system
        page.press(*ENTER)
        assert page.ask(ground) == seen[name] and name in page.ask(
            "document.getElementById('theme').textContent"
        )
    page.open(page.ask("location.href"))
    page.wait_until(f"document.querySelectorAll('#grid button').length === {SIZE}")
    assert "dark" in page.ask("document.getElementById('theme').textContent"), "it is remembered"
    page.ask("document.getElementById('theme').click()")
    page.prefer("light")
    assert page.ask(ground) == seen["light"]


def test_charts_grow_and_narrow_windows_do_not_scroll_sideways(job: Any, page: Any, tmp_path: Path) -> None:
    job.begin("on")
    page.wait_until("Number(document.getElementById('sum-step').title) > 60", 30)
    page.listen(12)  # for charts with something in them
    assert page.ask("document.querySelectorAll('.chart canvas').length") == 2
    assert page.ask(
        "charts.every((one) => one.plot.data[0].length >= 8 && one.plot.data[1].some((v) => v > 0))"
    )
    assert "median rank:" in page.ask("document.getElementById('chart-step').getAttribute('aria-label')")
    page.wait_until(f"{tile(1)}.textContent.startsWith('1late')")
    page.wait_until("/rank 1 late: .*train.py:/.test(document.getElementById('reasons').textContent)")
    assert page.ask(f"getComputedStyle({tile(1)}).backgroundColor") == page.ask(COLOUR % "late")
    assert page.ask("document.querySelectorAll('#grid button.late').length") == 1
    picture(page, tmp_path, "dashboard")
    for width in (360, 768, 1280):
        page.set_size(width, 1000)
        page.listen(0.2)
        assert page.ask("document.documentElement.scrollWidth <= innerWidth"), width


def test_in_a_stall_the_rank_that_holds_the_others_up_stands_out(job: Any, page: Any, tmp_path: Path) -> None:
    job.begin("stall")
    try:
        page.wait_until(f"{tile(2)}.textContent === '2holds up'", 60)
        page.wait_until("document.querySelectorAll('#grid button.late').length === 1")
        page.wait_until(
            "/rank 2 holds up the others: in .*train.py:/.test(document.getElementById('reasons').textContent)"
        )
        page.wait_until("document.getElementById('sum-slowest').textContent === 'rank 2'")
        assert page.ask(f"{tile(2)}.title.split('holds up').length") == 2, "it is said once"
        page.set_size(390, 844)
        page.listen(0.5)
        picture(page, tmp_path, "dashboard_stall_phone")
    finally:
        (job.folder / "go.stall").unlink()
    page.wait_until(f"!{tile(2)}.textContent.includes('holds up')", 30)


def test_a_killed_rank_turns_red_within_two_seconds_and_the_end_is_told(
    job: Any, page: Any, tmp_path: Path
) -> None:
    red = page.ask(COLOUR % "lost")
    assert page.ask(f"getComputedStyle({tile(3)}).backgroundColor") != red
    pid = page.ask(
        "Number([...document.querySelectorAll('#table tbody tr')].find((r) => r.dataset.rank === '3').cells[2].title)"
    )
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    page.wait_until(f"getComputedStyle({tile(3)}).backgroundColor === '{red}'", 5)
    took_s = time.monotonic() - killed_s
    print(f"red after {took_s:.2f} s")
    assert took_s < 2
    page.wait_until(
        "document.getElementById('events').textContent.includes('rank 3 was killed by SIGKILL')", 5
    )
    page.wait_until(
        "document.getElementById('connection').textContent.startsWith('the job has ended: root cause: rank 3')",
        30,
    )
    assert page.ask("document.getElementById('connection').dataset.state") == "failed"
    assert "rank 3 is lost: SIGKILL" in page.ask("document.getElementById('reasons').textContent")
    assert page.ask("document.querySelectorAll('#grid button[data-state=lost]').length") == 1, (
        "who was killed"
    )
    picture(page, tmp_path, "dashboard_lost_phone")
    assert job.started.finish(30).returncode == 137
    page.listen(0.5)
    assert page.problems == []
    assert page.requests and all(
        url.startswith(job.dashboard_url) for url in page.requests if url != "about:blank"
    )
