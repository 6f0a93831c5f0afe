"""The Python on the pages about other frameworks than torch, views and plans runs as it stands, on two ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from world import run_python

ROOT = Path(__file__).resolve().parents[2]
RUN = [Path(sys.executable).with_name("horoclonerun"), "-np", "2", sys.executable]


def block_of(page: str, part: str, **in_place_of: str) -> str:
    """The block of a page that has `part` in it; in_place_of: what stands for what a reader has to fill in."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )
    (block,) = [one for one in blocks if part in one]
    for other, text in in_place_of.items():
        assert text in block, f"{page}: {text!r} is not in the block with {part!r}"
        block = block.replace(text, other)
    return str(block)


def run(launch: Any, folder: Path, *parts: str, env: dict[str, str] | None = None) -> str:
    script = folder / "train.py"
    script.write_text("\n".join(parts))
    return str(launch([*RUN, script], env=env, timeout_s=150, cwd=folder).stdout)


@pytest.mark.long(40)
def test_jax(launch: Any, tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    before = """
import jax.numpy as jnp
params = {"w": jnp.ones(4)}
def loss_of(params, batch):
    return ((batch @ params["w"] - 1) ** 2).mean()
"""
    after = """
for _ in range(3):
    params, state, loss = step(params, state, jnp.ones((8, 4)) * (1 + hvd.rank()))
both = hvd.allgather(params["w"].reshape(1, -1))
assert (both[0] == both[1]).all() and not (both == 1).any()
print("rank", hvd.rank(), "is content")
"""
    said = run(launch, tmp_path, before, block_of("jax.md", "@jax.jit"), after)
    assert said.count("is content") == 2, said
    gpus = block_of("jax.md", "CUDA_VISIBLE_DEVICES")  # without a GPU the variable changes nothing
    assert run(launch, tmp_path, gpus, "print('devices', len(jax.devices()))").count("devices 1") == 2


@pytest.mark.long(40)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras(launch: Any, tmp_path: Path, backend: str) -> None:
    for package in ("keras", backend, "tensorboard"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    before = """
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
my_share_of_x = np.random.rand(640, 4).astype("float32")
my_share_of_y = my_share_of_x.sum(1, keepdims=True)
"""
    lines = block_of("keras.md", "BroadcastGlobalVariablesCallback", **{'loss="mse"': "loss=..."})
    logged = block_of(
        "observing.md",
        "model.fit(...",
        **{"model.fit(my_share_of_x, my_share_of_y, batch_size=4": "model.fit(..."},
    )
    after = """
rows = hvd.allgather(np.asarray(keras.ops.convert_to_numpy(model.weights[0])).reshape(1, -1))
assert (rows[0] == rows[1]).all()
print("rank", hvd.rank(), "is content")
"""
    said = run(launch, tmp_path, before, lines, logged, after, env={"KERAS_BACKEND": backend})
    assert said.count("is content") == 2, said
    assert list((tmp_path / "runs" / "first").glob("events*"))


@pytest.mark.long(40)
def test_tensorflow(launch: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    before = """
import tensorflow as tf
variables = [tf.Variable([1.0, 2.0])]
optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
def compute_loss(x, y):
    return tf.reduce_mean((x * variables[0] - y) ** 2)
"""
    after = """
losses = [float(train_step(tf.constant([1.0, 2.0]), tf.constant([3.0, 1.0 + hvd.rank()]))) for _ in range(3)]
assert losses[0] > losses[1] > losses[2]
print("rank", hvd.rank(), "has", losses[2])
"""
    said = run(launch, tmp_path, before, block_of("tensorflow.md", "DistributedGradientTape"), after)
    assert len(set(re.findall(r" has (\S+)", said))) == 1 and said.count(" has ") == 2, said


@pytest.mark.long(40)
def test_tensorflows_data_service(launch: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    before = """
import tensorflow as tf
import horoclone.tensorflow as hvd
hvd.init()
dataset = tf.data.Dataset.range(20).batch(5)
"""
    rest = "seen = sorted(int(x) for rows in dataset for x in rows)\nfound = hvd.allgather_object(seen)\n"
    rest += "assert sorted(sum(found, [])) == list(range(20)), found\nprint('rank', hvd.rank(), 'is content')"
    block = block_of("tensorflow.md", "send_to_data_service", **{rest: "..."})
    command = re.search(
        r"^horoclonerun (-np 4 python -m (horoclone\S+) service.json)$",
        (ROOT / "docs/tensorflow.md").read_text(),
        re.M,
    )
    assert command is not None
    service = launch.start([*RUN, "-m", command[2], tmp_path / "service.json"])
    assert run(launch, tmp_path, before, block).count("is content") == 2
    assert service.finish(timeout_s=60).returncode == 0


@pytest.mark.long(40)
@pytest.mark.parametrize("part", ["max_epochs=10", "fp16_compress_hook", "import MetricsCallback"])
def test_lightning(launch: Any, tmp_path: Path, part: str) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    before = """
import lightning.pytorch as pl
import torch
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return (self.layer(batch[0]) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
model = Model()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(64, 4)), 8)
"""
    block = block_of("observing.md" if "Metrics" in part else "lightning.md", part)
    rest = "" if "fit" in block else "trainer.fit_loop.max_epochs = 2\ntrainer.fit(model, data)\n"
    after = "import horoclone.torch as hvd\nprint('rank', hvd.rank(), 'of', trainer.world_size)"
    said = run(launch, tmp_path, before, block, rest, after)
    assert len(re.findall(r"rank \d of 2", said)) == 2, said


@pytest.mark.long(40)
def test_plan(launch: Any, tmp_path: Path) -> None:
    for package in ("torch", "rich"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "train_model.py").write_text(block_of("plan.md", "def build"))
    (command,) = re.findall(r"^```\nhoroclone (plan .*)\n```", (ROOT / "docs" / "plan.md").read_text(), re.M)
    tool = RUN[0].with_name("horoclone")
    said = launch([tool, *command.split(), "--json", "plan.json"], cwd=tmp_path, timeout_s=150).stdout
    assert re.search(r"^chosen: ", said, re.M), said
    again = launch([tool, "simulate", "--layers", "plan.json", "--ranks", "8"], cwd=tmp_path).stdout
    assert "tree" in again and "star" in again


def test_jobs_and_pages_from_outside(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import horoclone as hvd, time\nhvd.init()\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    job = launch.start([*RUN, tmp_path / "train.py"])
    job.wait_for("up", 30)
    done = run_python(block_of("observing.md", "job.jobs()"))
    assert re.search(rf"^{job.process.pid} .*train\.py$", done.stdout, re.M), done.stdout + done.stderr
