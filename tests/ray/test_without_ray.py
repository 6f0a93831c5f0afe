"""What needs no cluster: Ray that is missing or too old, and parameters that do not fit together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from world import ran

ROOT = Path(__file__).resolve().parents[2]


def said(python: Path | str, code: str, **variables: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(Path.home()), **variables}
    done = ran(str(python), "-c", code, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_ray_the_error_says_what_to_install() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "ray" else find(name, *a)
for module in ("horoclone.ray", "horovod.ray", "horovod.ray.elastic_v2"):
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        print(error.name, error)
"""
    lines = said(sys.executable, code).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("ray ") and "pip install 'ray[default]'" in line for line in lines), lines


def test_too_old_a_ray_is_refused() -> None:
    code = """
import importlib.metadata, importlib.util
version, find = importlib.metadata.version, importlib.util.find_spec
importlib.metadata.version = lambda name: "2.8.1" if name == "ray" else version(name)
importlib.util.find_spec = lambda name, *a: object() if name == "ray" else find(name, *a)
try:
    import horoclone.ray
except ImportError as error:
    print(error)
"""
    text = said(sys.executable, code)
    assert "Ray 2.8.1 is installed" in text and "ray>=2.9" in text, text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "max without min": ({"max_workers": 2}, "without any positive `min_workers`"),
    "max with a min of 0": ({"min_workers": 0, "max_workers": 2}, "without any positive `min_workers`"),
    "min and num": ({"min_workers": 1, "num_workers": 2}, "cannot be elastic and non-elastic"),
    "nothing": ({}, "Either `num_workers` or `num_hosts`"),
    "hosts and workers": ({"num_workers": 1, "num_hosts": 1}, "Either `num_workers` or `num_hosts`"),
    "no workers": ({"num_workers": 0}, "`num_workers` must be from 1 to 32768, not 0"),
    "min above max": ({"min_workers": 3, "max_workers": 2}, "less than `min_workers`"),
    "GPUs without use_gpu": ({"num_workers": 1, "gpus_per_worker": 1}, "use_gpu must be True"),
    "no GPU with use_gpu": ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": -1}, "must be >= 1"),
    "neither CPU nor GPU": ({"num_workers": 1, "cpus_per_worker": 0}, "needs a CPU or a GPU"),
    "a cooldown that is none": ({"min_workers": 1, "cooldown_range": (9, 3)}, "cooldown"),
}


def test_parameters_that_do_not_fit_are_value_errors(engines: Path) -> None:
    code = f"""
from horovod.ray import ElasticRayExecutor, RayExecutor
for name, (parameters, _) in {WRONG!r}.items():
    try:
        RayExecutor(RayExecutor.create_settings(), **parameters)
    except ValueError as error:
        print(f"{{name}}|{{error}}")
try:
    ElasticRayExecutor(ElasticRayExecutor.create_settings(), gpus_per_slot=2)
except ValueError as error:
    print(f"slots|{{error}}")
"""
    texts = dict(line.split("|", 1) for line in said(engines, code).splitlines() if "|" in line)
    for name, (_, expected) in WRONG.items():
        assert expected in texts.get(name, ""), (name, texts.get(name))
    assert "use_gpu must be True" in texts["slots"]


def test_ray_train_is_asked_for_what_it_can_do(engines: Path) -> None:
    code = """
from ray.train.v2.torch.torch_trainer import TorchTrainer
from horoclone import errors
from horoclone.ray import train
try:
    train.HorocloneConfig(elastic=True)
except errors.Unsupported as error:
    print(error)
train.TorchTrainer = TorchTrainer
config = train.HorocloneConfig(elastic=True, min_workers=3)
try:
    config.backend_cls().on_start(type("Group", (list,), {"get_replica_groups": list})([0, 1]), config)
except ValueError as error:
    print(error)
"""
    first, second = said(engines, code, RAY_TRAIN_V2_ENABLED="0").splitlines()
    assert "RAY_TRAIN_V2_ENABLED=0 asks for" in first and "out of the environment" in first
    assert second == "HorocloneConfig(min_workers=3) is more than the 2 workers that there are"


def test_slots_are_counted_as_horovod_counts_them(engines: Path) -> None:
    code = """
import ray
from horovod.ray.elastic import RayHostDiscovery
from horovod.ray.elastic_v2 import RayHostDiscovery as Second

def nodes(*resources, alive="alive"):
    return [{"NodeManagerAddress": f"host-{n}", "Resources": dict(one), alive: True} for n, one in enumerate(resources)]

ray.nodes = lambda: nodes({"CPU": 8, "GPU": 2}, {"CPU": 4, "GPU": 3}) + [{"NodeManagerAddress": "dead", "Resources": {"CPU": 9}, "alive": False}]
print(RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots())
print(RayHostDiscovery(cpus_per_slot=3).find_available_hosts_and_slots())
print(Second(use_gpu=True, cpus_per_worker=4, gpus_per_worker=1).find_available_hosts_and_slots())
ray.nodes = lambda: nodes({"CPU": 8}, {"GPU": 3}, alive="Alive")
print(RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots(), RayHostDiscovery().find_available_hosts_and_slots())
"""
    assert said(engines, code).splitlines() == [
        "{'host-0': 2, 'host-1': 3}",
        "{'host-0': 2, 'host-1': 1}",
        "{'host-0': 2, 'host-1': 1}",
        "{} {'host-0': 8}",
    ]


def test_silence_of_a_client_is_what_was_listened_to(engines: Path) -> None:
    code = """
from horoclone.ray.client_life import Silence, silence_s
print(silence_s({}), *(silence_s({"RAY_CLIENT_RECONNECT_GRACE_PERIOD": text}) for text in ("60", "0", "3", "soon")))
silence = Silence(100.0)
print(*(silence.heard("1", now) for now in (101.0, 102.0, 103.5)))
print("stopped", silence.heard("1", 200.0), "and again", silence.heard("2", 201.0))
silence.not_asked(250.0)
print("no answer", silence.heard("2", 251.0), "no key", silence.heard(None, 252.0))
"""
    assert said(engines, code).splitlines() == [
        "7.0 60.0 7.0 7.0 7.0",
        "0.0 1.0 2.5",
        "stopped 4.5 and again 0.0",
        "no answer 1.0 no key 2.0",
    ]


@pytest.mark.long(60)
@pytest.mark.parametrize("arguments", [[], ["--elastic"]], ids=["fixed", "elastic"])
def test_the_example_trains(arguments: list[str], engines: Path, launch: Any) -> None:
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    running = launch.start([engines, ROOT / "examples" / "ray_digits.py", *arguments], env=env)
    done = running.finish(170)
    assert done.returncode == 0, done.output
    assert "2 ranks, test accuracy 9" in done.stdout and "'epoch': 12" in done.stdout, done.output
    left = running.left_over(20)  # Ray's own processes end one after the other
    assert not left, left
