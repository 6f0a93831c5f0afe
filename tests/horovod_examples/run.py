"""Runs Horovod's published examples, unedited, on two ranks with small synthetic data.

    python tests/horovod_examples/run.py FOLDER [NAME ...]

FOLDER: the folder examples/ of a copy of Horovod's sources. NAME: parts of names of examples.yaml; none: all of them.
Ends with 1 when one of them fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_S = 800.0  # the longest take a minute on a quiet machine of two cores
RANKS = 2


def listed() -> list[dict[str, Any]]:
    """The entries of examples.yaml."""
    return list(yaml.safe_load((HERE / "examples.yaml").read_text())["examples"])


def obstacle(example: dict[str, Any], folder: Path) -> str:
    """Why the example cannot be run here; "" when it can."""
    if "waits_for" in example:
        return f"needs {example['waits_for']}"
    if not (folder / example["name"]).exists():
        return f"{folder / example['name']} is not there"
    missing = [name for name in example.get("needs", ()) if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def command_of(example: dict[str, Any], script: Path) -> list[str]:
    words = [sys.executable, str(script), *example.get("arguments", ())]
    if example.get("start") == "itself":  # by horovod.run()
        return words
    return [sys.executable, "-m", "horovod.runner.launch", "-np", str(RANKS), *words]


def run(example: dict[str, Any], folder: Path, place: Path) -> str:
    """Runs one example in the empty folder `place` and returns its output. AssertionError, with the output, when it fails,
    does not end within LIMIT_S, or does not say what examples.yaml expects."""
    script = folder / example["name"]
    before = script.read_bytes()
    specification = importlib.util.spec_from_file_location("data", HERE / "data.py")
    assert specification is not None and specification.loader is not None
    data = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(data)
    if "data" in example:
        getattr(data, example["data"])(place)
    modules = place / "modules"
    shutil.copytree(HERE / "modules", modules)
    if importlib.util.find_spec("torchvision") is not None:
        shutil.rmtree(modules / "torchvision")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOME": str(place),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(modules), str(ROOT), os.environ.get("PYTHONPATH")))),
        **example.get("environment", {}),
    }
    try:
        done = subprocess.run(
            command_of(example, script), cwd=place, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said if isinstance(said, str) else said.decode(errors="replace")
        raise AssertionError(f"{example['name']} had not ended after {LIMIT_S:g} s\n{text[-8000:]}") from None
    assert done.returncode == 0, f"{example['name']} ended with {done.returncode}\n{done.stdout[-8000:]}"
    assert re.search(example["expect"], done.stdout), (
        f"{example['name']} did not say {example['expect']}\n{done.stdout[-8000:]}"
    )
    assert script.read_bytes() == before, "an example is run as it is"
    return done.stdout


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    folder, wanted = Path(sys.argv[1]).resolve(), sys.argv[2:]
    failures = 0
    for example in listed():
        if wanted and not any(word in example["name"] for word in wanted):
            continue
        title = " ".join([example["name"], *example.get("arguments", ())])
        why = obstacle(example, folder)
        if why:
            print(f"left out  {title}: {why}", flush=True)
            continue
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="horovod-example-") as place:
                run(example, folder, Path(place))
            print(f"ran       {title}: {time.monotonic() - started:.0f} s", flush=True)
        except AssertionError as error:
            failures += 1
            print(f"FAILED    {title}\n{error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
