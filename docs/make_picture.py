"""Draws docs/architecture.svg from the includes of csrc/ and the imports of horoclone/; --check: is it current?

Boxes are folders. An arrow leads from a box to one that it includes or imports; an arrow that follows from others is
left out. Folders that import each other in a circle share a box. Nothing but the standard library is needed, and the
same sources give the same text.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "horoclone"
PICTURE = Path(__file__).with_name("architecture.svg")

Graph = dict[str, set[str]]

# Layers of csrc/ that are drawn with their folders, and where files lie that are no layer of their own.
OPENED = ("engine", "collective")
LAYER_OF_FILE = {
    "include": "C API",
    "api.cc": "C API",
    "server_api.cc": "C API",
    "c_api.h": "C API",
    "tools/python": "python",
    "engine/context.h": "engine/context",
    "engine/iteration.h": "engine/context",
    "collective/host.cc": "collective/host",
}
# Modules below horoclone by their beginning: what is drawn together, and what apart from the rest of its folder.
GROUP_OF_MODULE = {
    "init and exit": ("runtime.lifecycle", "runtime.exit_hooks", "runtime.exported"),
    "arrays": ("arrays", "objects"),
    "handles": ("handles", "compression", "ops"),
    "errors and settings": ("errors", "settings", "numbers", "stand_ins", "tensor_names"),
    "common": ("common", "data"),
    "horovod": ("runner", "horovod"),
    "tools": ("simulate", "tools"),
}
# What a box holds, in a few words; in Python under the name of the package. A box without an entry has its name alone.
WORDS = {
    "python": "the module _core",
    "frameworks": "ops of TensorFlow, JAX",
    "tools": "simulator",
    "C API": "include/, *api.cc",
    "server": "tables and their copies",
    "agreement": "who is ready, what runs",
    "arithmetic": "reductions on the host",
    "net": "bytes between ranks",
    "device": "CUDA, NCCL, kernels",
    "base": "status, settings, log, wire format",
    "horoclone.torch": "optimizers, operations, c10d",
    "horoclone.tensorflow": "optimizers, operations",
    "horoclone.keras": "optimizers, callbacks",
    "horoclone.ps": "parameter server",
    "horoclone.jax": "primitives, optimizer",
    "horoclone.cupy": "CuPy's arrays",
    "horoclone.lightning": "a strategy",
    "horoclone.launch": "horoclonerun, doctor, debug",
    "horoclone.bootstrap": "who started us, rendezvous",
    "horoclone.membership": "who is in an elastic job",
    "horoclone.horovod": "Horovod's launcher by its names",
    "horoclone.common": "Horovod's modules by their names",
    "horoclone.selection": "what init measured",
    "horoclone.arrays": "operations on arrays, objects",
    "horoclone.init and exit": "runtime/lifecycle, exit_hooks",
    "horoclone.runtime": "the pointer, topology, counters",
    "horoclone.handles": "compression, handles, numbers",
    "horoclone.process_sets": "subsets of the ranks",
    "horoclone.tools": "simulate",
    "horoclone.tracking": "counters for trackers",
}
CIRCLE = " \N{LEFT RIGHT ARROW} "


# --- what is there -------------------------------------------------------------------------------------------------


def box_of_source(path: str) -> str:
    """Of a path below csrc/: layer, or layer/folder where the layer is drawn with its folders."""
    for beginning, layer in LAYER_OF_FILE.items():
        if path == beginning or path.startswith(beginning + "/"):
            return layer
    parts = path.split("/")
    if parts[0] in OPENED:
        return "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/."
    return parts[0]


def graph_of_sources() -> Graph:
    graph: Graph = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in (".h", ".cc", ".cu") or "tests" in path.relative_to(CSRC).parts:
            continue
        box = box_of_source(path.relative_to(CSRC).as_posix())
        found = graph.setdefault(box, set())
        for text in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
            if Path(text).name in ("horoclone.h", "horoclone_tools.h", "horoclone_server.h"):
                found.add("C API")
            elif (CSRC / text).is_file():
                found.add(box_of_source(text))
    return {box: found - {box} for box, found in graph.items()}


def box_of_module(name: str) -> str:
    for group, beginnings in GROUP_OF_MODULE.items():
        if name.startswith(beginnings):
            return group
    return name.split(".")[0]


def is_module(parts: list[str]) -> bool:
    return PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()


def imports_of(path: Path) -> Iterator[str]:
    """Modules below horoclone that a file imports, wherever it does, without those for annotations only."""
    text = path.read_text()
    tree = ast.parse(text)
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(tree) if "TYPE_CHECKING" in text else ():
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.removeprefix("horoclone.") for one in node.names if "horoclone." in one.name)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level:
                module = [*package[: len(package) - node.level + 1], *filter(None, module)]
            elif module[0] == "horoclone":
                module = module[1:]
            else:
                continue
            for one in node.names:
                yield ".".join([*module, one.name] if is_module([*module, one.name]) else module)


def graph_of_modules() -> Graph:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
    known = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in paths}
    graph: Graph = {}
    for path in paths:
        box = box_of_module(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        found = graph.setdefault(box, set())
        found |= {box_of_module(name) for name in imports_of(path) if name.split(".")[0] in known}
    return {box: found - {box} for box, found in graph.items()}


# --- graphs --------------------------------------------------------------------------------------------------------


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        box = waiting.pop()
        if box not in seen:
            seen.add(box)
            waiting.extend(graph.get(box, ()))
    return seen


def without_circles(graph: Graph) -> Graph:
    """What reaches itself through others becomes one box, named after all of them."""
    below = {box: reachable(graph, box) for box in graph}
    circle = {
        box: CIRCLE.join(sorted({box} | {other for other in below[box] if box in below.get(other, ())}))
        for box in graph
    }
    merged: Graph = {}
    for box, found in graph.items():
        target = merged.setdefault(circle[box], set())
        target |= {circle[other] for other in found if other in circle}
    return {box: found - {box} for box, found in sorted(merged.items())}


def reduced(graph: Graph) -> Graph:
    """Without the arrows that follow from others."""
    return {
        box: {other for other in found if not any(other in reachable(graph, way) for way in found - {other})}
        for box, found in graph.items()
    }


def ranks_of(graph: Graph) -> dict[str, int]:
    """The height above what includes nothing."""
    ranks: dict[str, int] = {}

    def rank(box: str) -> int:
        if box not in ranks:
            ranks[box] = 1 + max((rank(other) for other in graph[box]), default=-1)
        return ranks[box]

    for box in graph:
        rank(box)
    return ranks


# --- places --------------------------------------------------------------------------------------------------------

GAP_X, GAP_Y = 20.0, 36.0


@dataclass
class Box:
    name: str
    width: float
    height: float
    x: float = 0  # of the middle
    y: float = 0  # of the top
    inside: Layout | None = None
    words: str = ""


@dataclass
class Layout:
    boxes: dict[str, Box]
    ways: list[list[str]]  # each arrow: box, the empty places that it passes, box
    width: float = 0
    height: float = 0


def crossings(rows: list[list[str]], steps: list[tuple[str, str]]) -> int:
    place = {name: (r, i) for r, row in enumerate(rows) for i, name in enumerate(row)}
    ends_of: dict[int, list[tuple[int, int]]] = {}  # of what begins in a row
    for start, end in steps:
        row, at = place[start]
        ends_of.setdefault(row, []).append((at, place[end][1]))
    return sum(
        (a - c) * (b - d) < 0
        for ends in ends_of.values()
        for i, (a, b) in enumerate(ends)
        for c, d in ends[:i]
    )


def order_rows(rows: list[list[str]], steps: list[tuple[str, str]]) -> None:
    """Sorts by the middle of the neighbours, then swaps neighbours while that leaves fewer crossings.

    Crossings are counted among the steps that what moves is an end of: no others change.
    """
    steps_of = {name: [step for step in steps if name in step] for row in rows for name in row}
    for sweep in range(24):
        down = sweep % 2 == 0
        for r in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            beside = {name: i for i, name in enumerate(rows[r - 1 if down else r + 1])}

            def middle(
                name: str, down: bool = down, beside: dict[str, int] = beside, r: int = r
            ) -> tuple[float, int]:
                near = [beside[a if down else b] for a, b in steps_of[name] if (b if down else a) == name]
                own = rows[r].index(name)
                return (sum(near) / len(near) if near else float(own), own)

            theirs = [step for name in rows[r] for step in steps_of[name]]
            best, before = rows[r], crossings(rows, theirs)
            rows[r] = sorted(best, key=middle)
            if crossings(rows, theirs) > before:
                rows[r] = best
    moved = True
    while moved:
        moved = False
        for row in rows:
            for i in range(len(row) - 1):
                theirs = steps_of[row[i]] + steps_of[row[i + 1]]
                before = crossings(rows, theirs)
                row[i], row[i + 1] = row[i + 1], row[i]
                if crossings(rows, theirs) < before:
                    moved = True
                else:
                    row[i], row[i + 1] = row[i + 1], row[i]


def best_order(rows: list[list[str]], steps: list[tuple[str, str]]) -> list[list[str]]:
    """The one with the fewest crossings of many first orders, then that with the shortest arrows."""
    best, least = rows, (sys.maxsize, 0.0)
    for start in range(60):
        tried = [
            sorted(row, key=lambda name: hashlib.sha256(f"{start} {name}".encode()).digest()) for row in rows
        ]
        order_rows(tried, steps)
        at = {name: i - (len(row) - 1) / 2 for row in tried for i, name in enumerate(row)}
        found = (crossings(tried, steps), sum(abs(at[a] - at[b]) for a, b in steps))
        if found < least:
            best, least = tried, found
    return best


def spread(wished: list[float], widths: list[float]) -> list[float]:
    """Middles near the wished ones, in this order, without overlap: least squares, by pooling what collides."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + GAP_X)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(wished, offsets, strict=True):
        total, count = wish - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            other = pools.pop()
            total, count = total + other[0], count + other[1]
        pools.append((total, count))
    placed = [total / count for total, count in pools for _ in range(count)]
    return [place + offset for place, offset in zip(placed, offsets, strict=True)]


def place(boxes: Iterable[Box], graph: Graph) -> Layout:
    """Rows from what includes most to what includes nothing; an arrow over several rows has an empty place in each."""
    layout = Layout({box.name: box for box in boxes}, [])
    ranks = ranks_of(graph)
    top = max(ranks.values())
    rows: list[list[str]] = [[] for _ in range(top + 1)]
    for name in sorted(graph):
        rows[top - ranks[name]].append(name)
    for start in sorted(graph):
        for end in sorted(graph[start]):
            way = [start]
            for rank in range(ranks[start] - 1, ranks[end], -1):
                empty = f"{start} > {end} {rank}"
                layout.boxes[empty] = Box(empty, 4, 0)
                rows[top - rank].append(empty)
                way.append(empty)
            layout.ways.append([*way, end])
    steps = [step for way in layout.ways for step in pairwise(way)]
    rows = best_order(rows, steps)
    near: dict[str, list[str]] = {name: [] for name in layout.boxes}
    for a, b in steps:
        near[a].append(b)
        near[b].append(a)
    for row in rows:
        for name, x in zip(row, spread([0.0] * len(row), [layout.boxes[n].width for n in row]), strict=True):
            layout.boxes[name].x = x
    for _ in range(60):
        for row in rows:
            wished = []
            for name in row:
                others = [layout.boxes[other].x for other in near[name]]
                wished.append(sum(others) / len(others) if others else layout.boxes[name].x)
            for name, x in zip(row, spread(wished, [layout.boxes[n].width for n in row]), strict=True):
                layout.boxes[name].x = x
    left = min(box.x - box.width / 2 for box in layout.boxes.values())
    y = 0.0
    for row in rows:
        height = max(layout.boxes[name].height for name in row)
        for name in row:
            box = layout.boxes[name]
            box.x -= left
            box.height = box.height or height  # an arrow passes the whole row upright
            box.y = y + (height - box.height) / 2
        y += height + GAP_Y
    layout.width = max(box.x + box.width / 2 for box in layout.boxes.values())
    layout.height = y - GAP_Y
    return layout


# --- drawing -------------------------------------------------------------------------------------------------------

WIDTH, MARGIN, TITLE = 1000, 14, 26
FILLS = {"python": "#f6e3b4", "native": "#cfe0f5", "api": "#f3c6b8", "inner": "#f5f9ff"}
STYLE = """
  text { font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1d2733; text-anchor: middle }
  .name { font-size: 14px; font-weight: 600 } .small { font-size: 11px; fill: #46566a }
  .band { font-size: 14px; font-weight: 600; fill: #7d8b9c; text-anchor: start }
  .box { stroke: #5f7186; stroke-width: 1 } .band-box { fill: #8899aa; fill-opacity: 0.10; stroke: none }
  .arrow { fill: none; stroke: #7d8b9c; stroke-width: 1.4 } .inner { stroke-width: 1.1 }
""".strip("\n")


def text_width(text: str, size: float = 14) -> float:
    return len(text) * size * 0.56


def boxes_of(graph: Graph, package: str = "") -> list[Box]:
    boxes = []
    for name in graph:
        words = "a circle" if CIRCLE in name else WORDS.get(package + name, "")
        width = max(text_width(name), text_width(words, 11)) + 24
        boxes.append(Box(name, width, 44 if words else 32, words=words))
    return boxes


def opened(layer: str, graph: Graph) -> Box:
    """A layer with its folders in it."""
    inner = {
        box.split("/")[1]: {other.split("/")[1] for other in found if other.startswith(layer + "/")}
        for box, found in graph.items()
        if box.startswith(layer + "/")
    }
    calls = without_circles({name: found & set(inner) for name, found in inner.items()})
    shown = [Box(name, text_width(own_folder(layer, name), 12) + 18, 24) for name in calls]
    layout = place(shown, reduced(calls))
    return Box(layer, layout.width + 28, layout.height + 40, inside=layout)


def own_folder(layer: str, name: str) -> str:
    """The folder's own files are shown by the layer's name."""
    return CIRCLE.join(f"{layer}.*" if part == "." else part for part in name.split(CIRCLE))


def native_layout() -> Layout:
    graph = graph_of_sources()
    layers: Graph = {}
    for box, found in graph.items():
        layer = layers.setdefault(box.split("/")[0], set())
        layer |= {other.split("/")[0] for other in found} - {box.split("/")[0]}
    layers = without_circles(layers)
    boxes = [opened(box.name, graph) if box.name in OPENED else box for box in boxes_of(layers)]
    return place(boxes, reduced(layers))


def arrow(points: list[tuple[float, float]], kind: str) -> str:
    (x, y), *others = points
    path = f"M{x:.1f} {y:.1f}"
    for to_x, to_y in others:
        bend = (to_y - y) * 0.5
        path += f" C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    return f'<path class="arrow{kind}" marker-end="url(#head)" d="{path}"/>'


def ports(layout: Layout) -> dict[tuple[str, str, int], float]:
    """(box, the other end, +1 below or -1 above) -> x at which an arrow leaves or meets the box."""
    found: dict[tuple[str, str, int], float] = {}
    for side, (own, other) in ((1, (0, 1)), (-1, (1, 0))):
        ends: dict[str, list[str]] = {}
        for way in layout.ways:
            for step in pairwise(way):
                ends.setdefault(step[own], []).append(step[other])
        for name, others in ends.items():
            box = layout.boxes[name]
            others.sort(key=lambda each: layout.boxes[each].x)
            layer = min(box.width * 0.7, 26.0 * (len(others) - 1))
            for i, each in enumerate(others):
                share = i / (len(others) - 1) - 0.5 if len(others) > 1 else 0.0
                aim = layout.boxes[each].x
                straight = len(others) == 1 and abs(aim - box.x) < box.width / 2 - 12
                found[name, each, side] = aim if straight else box.x + share * layer
    return found


def draw(layout: Layout, x: float, y: float, fill: str, layer: str = "") -> Iterator[str]:
    at = ports(layout)
    for way in layout.ways:
        points: list[tuple[float, float]] = []
        for a, b in pairwise(way):
            one, other = layout.boxes[a], layout.boxes[b]
            points.append((x + at[a, b, 1], y + one.y + one.height))
            points.append((x + at[b, a, -1], y + other.y - (7 if b == way[-1] else 0)))
        yield arrow(points, " inner" if layer else "")
    for name, box in layout.boxes.items():
        if " > " in name:
            continue
        left, top, middle = x + box.x - box.width / 2, y + box.y, x + box.x
        colour = FILLS["api"] if name == "C API" else fill
        yield (
            f'<rect class="box" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
            f'rx="6" fill="{colour}"/>'
        )
        if box.inside is not None:
            yield f'<text class="name" x="{middle:.1f}" y="{top + 19:.1f}">{escape(name)}</text>'
            yield from draw(box.inside, left + 14, top + 28, FILLS["inner"], name)
        elif layer:
            shown = escape(own_folder(layer, name))
            yield f'<text class="small" x="{middle:.1f}" y="{top + 16:.1f}">{shown}</text>'
        else:
            down = 18 if box.words else 20.5
            yield f'<text class="name" x="{middle:.1f}" y="{top + down:.1f}">{escape(name)}</text>'
            if box.words:
                yield f'<text class="small" x="{middle:.1f}" y="{top + 34:.1f}">{escape(box.words)}</text>'


def band(title: str, y: float, height: float) -> Iterator[str]:
    yield f'<rect class="band-box" x="2" y="{y:.1f}" width="{WIDTH - 4}" height="{height:.1f}" rx="10"/>'
    yield f'<text class="band" x="{MARGIN}" y="{y + 20:.1f}">{escape(title)}</text>'


@functools.cache
def layouts() -> tuple[Layout, Layout]:
    """Of the Python packages and of the C++ layers."""
    modules = without_circles(graph_of_modules())
    return place(boxes_of(modules, "horoclone."), reduced(modules)), native_layout()


def picture() -> str:
    above, below = layouts()
    # What is wider than the picture becomes smaller.
    scales = [min(1.0, (WIDTH - 2 * MARGIN) / layout.width) for layout in (above, below)]
    heights = [
        layout.height * scale + TITLE + MARGIN for layout, scale in zip((above, below), scales, strict=True)
    ]
    starts = [2.0, heights[0] + 2 + GAP_Y]
    height = starts[1] + heights[1] + 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}">',
        "<!-- Drawn by docs/make_picture.py from includes and imports: `make docs`. -->",
        "<title>Layers of horoclone: arrows lead to what is included or imported</title>",
        f"<style>\n{STYLE}\n</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#7d8b9c"/></marker></defs>',
        *band("horoclone/  Python", starts[0], heights[0]),
        *band("csrc/  C++", starts[1], heights[1]),
    ]
    lefts = [(WIDTH - layout.width * scale) / 2 for layout, scale in zip((above, below), scales, strict=True)]
    for name in ("python", "frameworks"):  # loaded by the packages above
        box = below.boxes[name]
        x, end = lefts[1] + box.x * scales[1], starts[1] + TITLE + box.y * scales[1]
        lines.append(arrow([(x, starts[0] + heights[0]), (x, end - 7)], ""))
    for layout, left, start, scale, fill in zip(
        (above, below), lefts, starts, scales, (FILLS["python"], FILLS["native"]), strict=True
    ):
        lines.append(f'<g transform="translate({left:.1f} {start + TITLE:.1f}) scale({scale:.3f})">')
        lines += [*draw(layout, 0, 0, fill), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    text = picture()
    if "--check" in sys.argv[1:]:
        current = PICTURE.exists() and PICTURE.read_text() == text
        if not current:
            print(f"{PICTURE} is stale: run `make docs`", file=sys.stderr)
        return int(not current)
    PICTURE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
