"""The examples do what they say: each runs on two ranks in warm processes, and its last lines are read.

`make examples` starts the same files as a person would.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from world import printed_by, ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """What it prints on this rank."""
    import torch

    from horoclone import horovod_alias

    horovod_alias.install()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return printed_by(EXAMPLES / name, *arguments)


def last_line(pattern: str, text: str) -> list[float]:
    """The numbers of the groups in the last line that is not empty."""
    line = text.strip().splitlines()[-1]
    found = re.fullmatch(pattern, line)
    assert found is not None, f"{pattern!r} is not {line!r}"
    return [float(part) for part in found.groups()]


# --- each claim, read on rank 0's output ---


def synthetic(text: str) -> None:
    rates = [float(x) for x in re.findall(r"Iter #\d+: ([\d.]+) img/sec per rank", text)]
    total, spread = last_line(r"Total img/sec on 2 rank\(s\): ([\d.]+) \+-([\d.]+)", text)
    assert len(rates) == 4 and total > 0 and spread >= 0
    mean = float(re.findall(r"Img/sec per rank: ([\d.]+)", text)[0])
    assert mean == pytest.approx(sum(rates) / 4, abs=0.1)


def process_sets(text: str) -> None:
    assert text.count("trained by ranks") == 2
    sets, distance = last_line(r"(\d) process sets, largest distance ([\de.+-]+)", text)
    assert sets == 2 and distance < 1e-3


def join(text: str) -> None:
    few, many, last, error = last_line(
        r"steps per rank \[(\d+), (\d+)\], last to join: rank (\d), largest error ([\de.+-]+)", text
    )
    assert (few, many, last) == (60, 120, 1) and error < 0.05


def load_balance(text: str) -> None:
    fast, slow, error = last_line(r"shares \[(\d+), (\d+)\], largest error ([\de.+-]+)", text)
    assert fast + slow == 60 and fast > slow and error < 0.01


def embedding(text: str) -> None:
    rows, low, high, loss = last_line(r"(\d+) rows on 2 ranks as \[(\d+), (\d+)\], final loss ([\d.]+)", text)
    assert low + high == rows == 1000 and loss < 0.1


def evaluation(text: str) -> None:
    accuracy, recall = last_line(r"accuracy ([\d.]+), worst recall ([\d.]+), equal to one rank's: True", text)
    assert accuracy > 0.93 and recall > 0.7


def mixed(text: str) -> None:
    scale, accuracy = last_line(r"\w+float\d+: loss scale ([\d.]+), training accuracy ([\d.]+)%", text)
    assert scale == 1 and accuracy > 92


def backend(text: str) -> None:
    (accuracy,) = last_line(
        r"DDP on horoclone, 2 ranks, training accuracy ([\d.]+)%, same parameters: True", text
    )
    assert accuracy > 92


def compiled(text: str) -> None:
    assert float(re.findall(r"differ by ([\de.+-]+)", text)[0]) < 1e-4
    first, final = last_line(r"loss ([\d.]+) at first, ([\d.]+) after 50 steps on 2 ranks", text)
    assert final < 0.7 * first


def horovods(text: str) -> None:
    (accuracy,) = last_line(r"Test set: Average loss: [\d.]+, Accuracy: ([\d.]+)%", text)
    assert accuracy > 80


def zero(text: str) -> None:
    state = re.findall(r"2\.41 MB of state, of which the ranks keep (\d+)% and (\d+)%", text)
    assert state == [("50", "50")]
    sharded, whole = last_line(r"loss ([\d.]+) sharded, ([\d.]+) unsharded from its checkpoint", text)
    assert sharded == whole < 0.3


def on_gpu(text: str) -> None:
    loss, accuracy = last_line(r"trained on .+; loss ([\d.]+), training accuracy ([\d.]+)%", text)
    assert loss < 0.5 and accuracy > 90


def in_a_graph(text: str) -> None:
    steps, accuracy = last_line(r"(\d+) .+; training accuracy ([\d.]+)%", text)
    assert steps == 300 and accuracy > 95


def three_ways(text: str) -> None:
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+) on 2 x 1 x 1 ranks", text))
    assert last < first


def rarely(text: str) -> None:
    (accuracy,) = last_line(r"2 ranks, 400 steps, test accuracy ([\d.]+)%", text)
    assert accuracy > 93


def by_quorum(text: str) -> None:
    batches, rounds, accuracy = last_line(
        r"rank 0: (\d+) batches, (\d+) rounds, test accuracy ([\d.]+)%", text
    )
    # How many of them are its own is a matter of timing
    assert rounds >= 200 and batches > 25 and accuracy > 80


def same_bits(text: str) -> None:
    assert re.search(r"after 50 steps: sha256 \w{64}", text)


CLAIMS = {
    "torch_virtual_ranks.py": same_bits,
    "torch_parallel.py": three_ways,
    "torch_diloco.py": rarely,
    "torch_quorum.py": by_quorum,
    "torch_synthetic_benchmark.py": synthetic,
    "torch_process_sets.py": process_sets,
    "torch_join.py": join,
    "torch_load_balance.py": load_balance,
    "torch_alltoall_embedding.py": embedding,
    "torch_evaluation.py": evaluation,
    "torch_amp.py": mixed,
    "torch_ddp_backend.py": backend,
    "torch_compile.py": compiled,
    "torch_horovod_script.py": horovods,
    "torch_zero.py": zero,
    "torch_gpu_digits.py": on_gpu,
    "torch_gpu_graph.py": in_a_graph,
}


@pytest.mark.parametrize("name", CLAIMS)
@ranks(2, init=False, check=lambda said: CLAIMS[said[0][0]](said[0][1]))
def test_an_example(name: str) -> Any:
    return name, run_example(name)


@ranks(2, init=False, check=lambda said: horovods(said[0]))
def test_horovods_script_with_adasum() -> str:
    return run_example("torch_horovod_script.py", "--use-adasum")


@pytest.mark.parametrize("more", ["--fp16-allreduce", "--use-adasum"])
@ranks(2, init=False, check=lambda said: synthetic(said[0]))
def test_the_options_of_the_benchmark(more: str) -> str:
    return run_example("torch_synthetic_benchmark.py", more, "--num-batches-per-iter", "1")


@ranks(2, init=False, check=lambda said: check_digits(*said[0]))
def test_the_digits_in_two_epochs(tmp_path: Path) -> tuple[str, str]:
    checkpoint = tmp_path / "model.pt"
    words = ("--checkpoint", str(checkpoint), "--epochs", "2", "--accuracy", "0.85")
    return run_example("torch_digits.py", *words), str(checkpoint)


def check_digits(output: str, checkpoint: str) -> None:
    import torch

    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)%", output)]
    assert "2 ranks, identical parameters" in output
    assert len(accuracies) == 2 and accuracies[-1] >= 85, output
    assert set(torch.load(checkpoint)) == {"model", "optimizer"}


@ranks(2, init=False, check=lambda said: check_resumed(*said[0]))
def test_a_long_training_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> tuple[str, str]:
    folder = ("--checkpoint-dir", str(tmp_path), "--synthetic-images", "256")
    return (
        run_example("torch_imagenet_style.py", *folder, "--epochs", "2"),
        run_example("torch_imagenet_style.py", *folder, "--epochs", "5"),
    )


def check_resumed(first: str, second: str) -> None:
    pattern = r"2 ranks, epochs {} to {}, training accuracy ([\d.]+)%; \S+"
    (before,) = last_line(pattern.format(1, 2), first)
    (after,) = last_line(pattern.format(3, 5), second)
    assert "resumed after epoch 2" in second and "resumed" not in first
    assert after > 80 and after > before


@pytest.mark.long(30)
@ranks(2, init=False, check=lambda said: check_text(said[0]))
def test_a_small_model_of_text_with_compressed_gradients() -> str:
    small = "--steps 20 --sample 20 --megabytes 0.5 --layers 1 --width 64 --compress"
    return run_example("torch_gpt_text.py", *small.split())


def check_text(output: str) -> None:
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 2 and losses[1] < losses[0] < 6.0, output
    assert re.search(r"tokens/s per rank [\d,]+, [\d,]+; in all [\d,]+", output)


def test_every_example_is_listed() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if path.name not in page]
    assert not missing, f"not in docs/examples.md: {missing}"
