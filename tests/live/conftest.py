"""A running job with every view on it, and what lies in this folder beside the tests made importable."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

for name in ("synthetic_metrics", "browser", "terminal"):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])

# Some steps with a rank that is late, then nothing, so that figures stand still; `go` files begin what comes next.
PROGRAM = """
import json, os, pathlib, sys, time
import numpy as np
import horoclone as hvd

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def train(times):
    for _ in range(times):
        hvd.allreduce(np.ones(1000, np.float32), name="gradient")
        if hvd.rank() == 1:
            time.sleep(0.02)
        while hvd.rank() == 2 and (folder / "go.stall").exists():
            time.sleep(0.02)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

hvd.init()
train(steps)
hvd.broadcast(np.ones(250), 0, name="weights")
path = folder / f"metrics.{hvd.rank()}"
new = folder / f"new.{hvd.rank()}"
new.write_text(json.dumps(hvd.metrics()))
new.rename(path)
wait_for("go.on")
try:
    while not hvd.allreduce(np.float32((folder / "go.end").exists()), name="stop", op=hvd.Sum):
        train(10)
except hvd.HorovodInternalError:
    time.sleep(2)  # the launcher would wait for longer
    raise
"""


class Watched:
    """A job of horoclonerun with --metrics-port and --dashboard. calm: its ranks wait, and their figures stand still."""

    def __init__(self, started: Any, folder: Path, size: int) -> None:
        self.started, self.folder, self.size = started, folder, size
        started.wait_for("dashboard: http", 60)
        text = started.stderr
        self.metrics_url = re.search(r"metrics: (\S+)", text)[1]
        self.dashboard_url = re.search(r"dashboard: (\S+)", text)[1]

    @property
    def pid(self) -> int:
        return int(self.started.process.pid)

    def wait_until_calm(self, timeout_s: float = 60) -> None:
        self.started.until(lambda: len(list(self.folder.glob("metrics.*"))) == self.size, timeout_s)

    def metrics_of(self, rank: int) -> dict[str, Any]:
        """What the rank itself says."""
        return json.loads((self.folder / f"metrics.{rank}").read_text())

    def scrape(self) -> dict[str, Any]:
        """name -> family."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            return {one.name: one for one in text_string_to_metric_families(answer.read().decode())}

    def value(self, name: str, sample: str | None = None, **labels: str) -> float:
        return sum(
            one.value
            for one in self.scrape()[name].samples
            if one.name == (sample or one.name) and labels.items() <= one.labels.items()
        )

    def begin(self, name: str) -> None:
        (self.folder / f"go.{name}").touch()


@pytest.fixture(scope="module")
def start_watched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Watched]]:
    """start_watched(size, steps, flags, env) -> Watched, killed at the end of the module."""
    for package in ("prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[metrics,dashboard]'")
    pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")
    shared = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    runner = shared.Launch()

    def start(
        size: int,
        steps: int = 30,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
    ) -> Watched:
        folder = tmp_path_factory.mktemp("job")
        (folder / "train.py").write_text(PROGRAM)
        run = [
            Path(sys.executable).with_name("horoclonerun"),
            "-np",
            str(size),
            "--dashboard",
            "--metrics-port",
            "0",
        ]
        command = [*before, *run, *flags, sys.executable, folder / "train.py", folder, str(steps)]
        return Watched(runner.start(command, env=env), folder, size)

    yield start
    runner.close()
