"""Draws docs/figures/*.svg from the results beside them; --check: are they current?

Only the standard library is needed, and the same results give the same text. Colours follow the reader's choice of a
light or a dark page. A figure whose result is not kept in docs/figures is not drawn.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parent / "figures"

STYLE = """
 text { font: 13px system-ui, sans-serif; fill: #222 }
 .title { font-weight: 600 } .small { font-size: 11px; fill: #666 }
 .end { text-anchor: end } .middle { text-anchor: middle }
 .axis { stroke: #999 } .grid { stroke: #ddd } .whisker { stroke: #222; stroke-width: 1.5 }
 .ours { fill: #0b6e4f } .other { fill: #9aa5a0 } .plain { fill: #cdd4d1 }
 .c0 { stroke: #0b6e4f } .c1 { stroke: #c8553d } .c2 { stroke: #3d5a80 } .c3 { stroke: #8a5a9e }
 .c4 { stroke: #b8860b } .c5 { stroke: #3aa17e } .c6 { stroke: #777 } .line { fill: none; stroke-width: 2 }
 .d1 { stroke-dasharray: 6 3 } .d2 { stroke-dasharray: 2 3 }
 @media (prefers-color-scheme: dark) {
  text { fill: #ddd } .small { fill: #aaa } .grid { stroke: #444 } .whisker { stroke: #eee }
  .ours { fill: #2fae85 } .other { fill: #6d7773 } .plain { fill: #4a524f }
  .c0 { stroke: #2fae85 } .c1 { stroke: #e8836c } .c2 { stroke: #7fa3d1 } .c3 { stroke: #b98cce }
  .c4 { stroke: #d9aa3c } .c5 { stroke: #7fd6b8 } .c6 { stroke: #aaa }
 }
"""


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, said: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(said)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


# --- bars ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A value with its range; kind: `ours`, `other`, or `plain` for what nobody competes with."""

    label: str
    value: float
    low: float
    high: float
    kind: str


@dataclass(frozen=True)
class Bars:
    """One group of bars on one scale. mark: a value at which a line is drawn, and what it says."""

    title: str
    unit: str
    bars: Sequence[Bar]
    mark: tuple[float, str] | None = None


def kind_of(label: str) -> str:
    return "ours" if "horoclone" in label else "other"


def bars(title: str, groups: Sequence[Bars]) -> str:
    """Groups of horizontal bars, one below the other."""
    left, wide, row = 210.0, 400.0, 24.0
    y, parts = 8.0, []
    for group in groups:
        parts.append(text(8, y + 14, group.title, "title"))
        y += 26
        mark = group.mark[0] if group.mark is not None else 0.0
        scale = wide / max(mark, *(one.high for one in group.bars))
        if group.mark is not None:
            below = y + row * len(group.bars)
            parts.append(stroke(left + mark * scale, y, left + mark * scale, below, "axis"))
            parts.append(text(left + mark * scale, below + 10, group.mark[1], "small middle"))
        for one in group.bars:
            middle, end = y + row / 2, left + one.high * scale + 8
            if end < left + mark * scale < end + 80:  # the line would cross the value
                end = left + mark * scale + 6
            parts += [
                text(left - 8, middle + 4.5, one.label, "end"),
                box(left, y + 3, one.value * scale, row - 6, one.kind),
                stroke(left + one.low * scale, middle, left + one.high * scale, middle, "whisker"),
                text(end, middle + 4.5, f"{shown(one.value)} {group.unit}"),
            ]
            y += row
        y += 24 if group.mark is not None else 12
    return document(720, round(y), title, parts)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.2g}" if value < 1 else f"{value:.1f}"


# --- lines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """A panel: series by their name, each a list of points. x is logarithmic, y where `log` says so."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = False
    styles: Mapping[str, str] = field(default_factory=dict)


def ticks(most: float) -> list[float]:
    """Some round values from 0 up to about `most`."""
    step = 10 ** math.floor(math.log10(most))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if most / s <= 6)
    return [step * n for n in range(int(most / step) + 1)]


def lines(title: str, x_name: str, panels: Sequence[Lines]) -> str:
    """Panels beside each other, with one legend below them."""
    wide, high, top, gap = 250.0, 200.0, 34.0, 76.0
    parts: list[str] = []
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    style = {name: panel.styles.get(name, f"c{i % 7}") for panel in panels for i, name in enumerate(names)}
    for number, panel in enumerate(panels):
        left = gap - 8 + number * (wide + gap)
        points = [point for series in panel.series.values() for point in series]
        sizes = sorted({x for x, _ in points})
        least, most = min(y for _, y in points), max(y for _, y in points)
        marks = ticks(most)
        if panel.log:
            marks = [10.0**n for n in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]

        def at_x(x: float, left: float = left, sizes: Sequence[float] = sizes) -> float:
            return left + 8 + (wide - 16) * math.log(x / sizes[0]) / math.log(sizes[-1] / sizes[0])

        def at_y(
            y: float, marks: Sequence[float] = marks, most: float = most, log: bool = panel.log
        ) -> float:
            if log:
                return top + high * (1 - math.log(y / marks[0]) / math.log(marks[-1] / marks[0]))
            return top + high * (1 - y / max(most, marks[-1]) / 1.02)

        parts.append(text(left + wide / 2, 20, panel.title, "title middle"))
        for mark in marks:
            parts.append(stroke(left, at_y(mark), left + wide, at_y(mark), "grid"))
            parts.append(text(left - 6, at_y(mark) + 4, f"{mark:,.0f}", "small end"))
        for x in sizes:
            parts.append(text(at_x(x), top + high + 16, f"{x:,.0f}", "small middle"))
        parts.append(text(left + wide / 2, top + high + 34, x_name, "small middle"))
        for name, series in panel.series.items():
            path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in series)
            parts.append(f'<polyline points="{path}" class="line {style[name]}"/>')
    y = top + high + 58
    for number, name in enumerate(names):
        x, below = 60 + (number % 4) * 230, y + (number // 4) * 20
        parts += [stroke(x, below, x + 30, below, f"line {style[name]}"), text(x + 38, below + 4, name)]
    width = round(gap + len(panels) * (wide + gap) - gap + 8)
    return document(width, round(y + (len(names) - 1) // 4 * 20 + 14), title, parts)


# --- the figures ---------------------------------------------------------------------------------------------------


def result(name: str) -> Any:
    return json.loads((FIGURES / name).read_text())


def step_bars(name: str, title: str, labels: Mapping[str, str]) -> Bars:
    """Times of a step from a result of benchmarks/step.py: the median of the rounds, from the least to the largest."""
    times = result(name)["times"]
    found = []
    for key, label in labels.items():
        wall = times[key]["wall"]
        kind = "plain" if label == "without communication" else kind_of(label)
        found.append(Bar(label, statistics.median(wall), min(wall), max(wall), kind))
    return Bars(title, "ms", found)


def speed() -> str:
    alone = "without communication"
    torch = {"torch alone": alone, "torch horoclone": "horoclone", "torch DDP-view": "DDP over gloo, views",
             "torch DDP": "DDP over gloo"}  # fmt: skip
    keras = {"tf_keras alone": alone, "tf_keras horoclone": "horoclone",
             "tf_keras MultiWorkerMirrored": "MultiWorkerMirrored"}  # fmt: skip
    return bars(
        "A training step of two processes on one machine, 100 MB of gradients",
        [
            step_bars("step_torch.json", "PyTorch: a training step, 100 MB of gradients, 2 processes", torch),
            step_bars("step.json", "Keras on TensorFlow: the same", keras),
        ],
    )


def network() -> str:
    groups = []
    for case in result("network.json")["cases"].values():
        size, facts = case["sizes"][-1], case["case"]
        mebibytes = size["bytes"] >> 20
        found = [
            Bar(label, *(size["bytes"] * 8 / one[key] / 1e3 for key in ("median_us", "high_us", "low_us")),
                kind_of(label))
            for label, one in size["contestants"].items()
        ]  # fmt: skip
        title = f"{facts['gbit']} Gbit/s, 2 hosts of {facts['per_host']}, {mebibytes} MiB: buffer over time"
        groups.append(Bars(title, "Gbit/s", found, (facts["gbit"], "nominal rate")))
    return bars("Allreduce between two hosts", groups)


def control() -> str:
    rows = result("control.json")["rows"]
    titles = {"latency_us": "latency, us a step", "root_messages": "messages at the root",
              "root_bytes": "bytes at the root"}  # fmt: skip
    styles = {"tree": "c0", "star": "c1 d1"}
    panels = []
    for key, title in titles.items():
        series = {
            shape: [(row["ranks"], row[key]) for row in rows if row["shape"] == shape] for shape in styles
        }
        panels.append(Lines(title, series, log=True, styles=styles))
    return lines("Simulated agreement on 161 tensors, star and tree", "ranks", panels)


def control_processes() -> str:
    rows = result("control_processes.json")["rows"]
    fanout = rows[0]["fanout"]
    panels = {"node messages": "messages of a node a step", "node bytes": "bytes of a node a step",
              "cpu_us": "CPU of a rank, us a step"}  # fmt: skip
    colours = {"by name": "c1", "grouped": "c0", "declared": "c2"}
    dashes = {"TCP": "", "shared memory": " d1", "mixed": " d2"}
    drawn = []
    for key, title in panels.items():
        series: dict[str, list[tuple[float, float]]] = {}
        styles = {}
        for row in rows:
            if row["fanout"] == fanout:
                name = f"{row['form']}, {row['way']}"
                series.setdefault(name, []).append((row["ranks"], row[key]))
                styles[name] = colours.get(row["form"], "c6") + dashes[row["way"]]
        drawn.append(Lines(title, series, styles=styles))
    return lines("Agreement on 161 tensors by real processes", "ranks", drawn)


DRAWN: dict[str, Callable[[], str]] = {
    "speed.svg": speed,
    "network.svg": network,
    "control.svg": control,
    "control_processes.svg": control_processes,
}


def main() -> int:
    figures = {FIGURES / name: draw() for name, draw in DRAWN.items()}
    if "--check" in sys.argv:
        old = [
            place.name for place, drawn in figures.items() if not place.exists() or place.read_text() != drawn
        ]
        print(*(f"not current: {name}" for name in old), sep="\n")
        return 1 if old else 0
    for place, drawn in figures.items():
        place.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
