"""docs/architecture.svg: current, legible, and drawn from what the sources include and import."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from world import load

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load(DOCS / "make_picture.py", "make_picture")


def test_the_picture_is_current_and_on_the_page(maker: ModuleType) -> None:
    text = maker.picture()
    assert maker.PICTURE.read_text() == text, "run `make docs`"
    assert "](architecture.svg)" in (DOCS / "architecture.md").read_text()
    ElementTree.fromstring(text)


def test_boxes_do_not_overlap_and_arrows_lead_down(maker: ModuleType) -> None:
    above, below = maker.layouts()
    found = [above, below, *(box.inside for box in below.boxes.values() if box.inside is not None)]
    assert len(found) == 2 + len(maker.OPENED)
    for layout in found:
        for one, other in combinations(layout.boxes.values(), 2):
            apart_x = abs(one.x - other.x) - (one.width + other.width) / 2
            apart_y = max(one.y, other.y) - min(one.y + one.height, other.y + other.height)
            assert max(apart_x, apart_y) > 8, (one.name, other.name)
        for way in layout.ways:
            for a, b in pairwise(way):
                assert layout.boxes[a].y + layout.boxes[a].height < layout.boxes[b].y, way


def test_every_folder_of_the_sources_is_drawn(maker: ModuleType) -> None:
    text = (DOCS / "architecture.svg").read_text()
    layers = {path.parent.relative_to(maker.CSRC).parts[0] for path in maker.CSRC.glob("*/*.h")}
    for folder in (
        *layers - {"include", "tests"},
        *(path.parent.name for path in maker.CSRC.glob("engine/*/*.h")),
    ):
        assert folder in text, folder
