"""The views of 64 real ranks on one machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import browser
import pytest
from terminal import terminal

SIZE = 64
HOROCLONE = Path(sys.executable).with_name("horoclone")

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(90)]


@pytest.fixture(scope="module")
def job(start_watched: Any) -> Any:
    pytest.importorskip("rich", reason="rich is not installed: pip install '.[top]'")
    made = start_watched(SIZE, 10)
    made.wait_until_calm(300)
    return made


def test_a_scrape_has_all_ranks(job: Any) -> None:
    families = job.scrape()
    assert {one.labels["rank"] for one in families["horoclone_rank_up"].samples} == {
        str(n) for n in range(SIZE)
    }
    own = [job.metrics_of(rank)["by_operation"]["allreduce"] for rank in range(SIZE)]
    counted = job.value("horoclone_operations", "horoclone_operations_total", operation="allreduce")
    assert counted == sum(one["count"] for one in own) == SIZE * 10


@pytest.mark.parametrize("columns", [80, 200])
def test_top_scrolls_through_all_ranks(job: Any, columns: int) -> None:
    with terminal([HOROCLONE, "top", "--interval", "0.5", str(job.pid)], columns, 24, os.environ) as shown:
        shown.wait_for("64 ranks: 64 running", 30)
        assert "\n   63 " not in shown.plain.replace("\r", "")
        for _ in range(7):
            shown.press("\x1b[6~")
        shown.wait_for(r"rank 63 on \S+: running", 30)
        shown.press("q")
        assert shown.end() == 0
        last = shown.plain.replace("\r", "").rpartition("horoclone job")[2].splitlines()
        assert [line.split()[0] for line in last[4 : 4 + SIZE]] == [str(rank) for rank in range(SIZE)]
        assert max(len(line) for line in last[1:]) <= columns


@pytest.mark.skipif(browser.find() is None, reason="no Chromium (Debian: apt-get install chromium)")
def test_the_page_shows_all_ranks(job: Any) -> None:
    with browser.browser(browser.find()) as page:
        page.set_size(1280, 1000)
        page.open(job.dashboard_url)
        page.wait_until(
            f"document.querySelectorAll('#grid button[data-state=running]').length === {SIZE}", 30
        )
        assert page.ask("document.querySelectorAll('#table tbody tr').length") == SIZE
        took_ms = page.ask(
            "(() => { const began = performance.now(); draw(); return performance.now() - began; })()"
        )
        assert took_ms < 1000 and page.problems == []


def test_the_job_ends_well(job: Any) -> None:
    job.begin("on")
    job.begin("end")
    assert job.started.finish(120).returncode == 0
