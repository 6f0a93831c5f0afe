"""Gradient compression against none: `python benchmarks/compression.py` trains two small models with every compressor.

Loss at the end, quality on data that was not trained on, bytes that each rank sent, time of a step. All ranks run on
this machine and talk through TCP, so that bytes can be counted. Exit codes: 0, 1 a rank failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from report import print_rows
from session import on_ranks, options, refuse, run

TASKS = {"digits": "test accuracy", "text": "held-out loss"}
COMPRESSORS = (
    "none", "fp16", "bf16", "int8", "int8 without feedback", "powersgd", "topk", "topk without feedback",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", 2, "ranks"), ("--steps", 300, "optimizer steps of each training, at least 20"),
        ("--tasks", list(TASKS), "what is trained", TASKS), ("--compressors", list(COMPRESSORS), "how", COMPRESSORS),
    )  # fmt: skip
    if arguments.steps < 20 or arguments.np < 2:
        refuse("--steps is 20 or more, --np 2 or more")
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    examples = str(Path(__file__).resolve().parent.parent / "examples")
    plan = (arguments.tasks, arguments.compressors, arguments.steps, examples)
    rows = on_ranks(train_all, *plan, np=arguments.np, HOROCLONE_SHARED_MEMORY="0")[0]
    return {"benchmark": f"training with compressed gradients, {arguments.np} ranks", "rows": rows}


def show(result: dict[str, Any]) -> None:
    """One table for each task."""
    for task, quality in TASKS.items():
        rows = [row for row in result["rows"] if row["task"] == task]
        whole = next((row["bytes"] for row in rows if row["compressor"] == "none"), None)
        if rows:
            print(f"{task}, {rows[0]['parameters']:,} parameters, {rows[0]['steps']} steps")
            head = [
                "compression", "loss at the end", quality, "KB sent per rank and step", "share", "ms per step",
            ]  # fmt: skip
            print_rows(head, [
                [row["compressor"], f"{row['loss']:.4f}", f"{row['quality']:.4f}", f"{row['bytes'] / 1e3:.1f}",
                 f"{row['bytes'] / whole:.3f}" if whole else "", f"{row['step_ms']:.1f}"]
                for row in rows
            ])  # fmt: skip


# --- on the ranks --------------------------------------------------------------------------------------------------


def train_all(tasks: list[str], compressors: list[str], steps: int, examples: str) -> list[dict[str, Any]]:
    """Every training in turn; rows of the table."""
    import torch

    import horoclone.torch as hvd

    sys.path.insert(0, examples)
    torch.set_num_threads(1)
    hvd.init()
    makers = {
        "int8": lambda: hvd.Compression.int8(),
        "int8 without feedback": lambda: hvd.Compression.int8(error_feedback=False),
        "powersgd": lambda: hvd.Compression.powersgd(rank=4, start_step=10),
        "topk": lambda: hvd.Compression.topk(ratio=0.01),
        "topk without feedback": lambda: hvd.Compression.topk(ratio=0.01, error_feedback=False),
    }
    rows = []
    for task in tasks:
        for name in compressors:
            compression = makers[name]() if name in makers else getattr(hvd.Compression, name)
            row = train_digits(compression, steps) if task == "digits" else train_text(compression, steps)
            rows.append({"task": task, "compressor": name, "steps": steps, **row})
            if hvd.rank() == 0:
                print(f"{task}, {name}: {row}", file=sys.stderr, flush=True)
    return rows


def train_digits(compression: Any, steps: int) -> dict[str, float]:
    """The network and data of examples/torch_digits.py, 32 images per rank and step."""
    import torch
    import torch.nn.functional as F
    from torch_digits import digits, network

    import horoclone.torch as hvd

    torch.manual_seed(0)
    model = network()
    train, test = digits()
    images, labels = train.tensors
    chance = torch.Generator().manual_seed(1 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of() -> Any:
        rows = torch.randint(len(images), (32,), generator=chance)
        return F.cross_entropy(model(images[rows]), labels[rows])

    row = train_model(model, optimizer, loss_of, compression, steps)
    model.eval()
    with torch.no_grad():
        row["quality"] = float((model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean())
    return row


def train_text(compression: Any, steps: int) -> dict[str, float]:
    """The transformer and text of examples/torch_gpt_text.py, 8 sequences of 64 characters per rank and step."""
    from argparse import Namespace

    import torch
    import torch.nn.functional as F
    from torch_gpt_text import Transformer, batch, library_text

    import horoclone.torch as hvd

    torch.manual_seed(0)
    form = Namespace(context=64, width=128, layers=3, heads=4, batch_size=8)
    model = Transformer(form)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02 if parameter is not model.symbol.weight else 0.1)
    text = library_text(1.0)
    cut = len(text) * 9 // 10
    chance = torch.Generator().manual_seed(1 + hvd.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def loss_on(part: Any, generator: Any) -> Any:
        inputs, targets = batch(part, form, generator)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    row = train_model(model, optimizer, lambda: loss_on(text[:cut], chance), compression, steps)
    with torch.no_grad():
        own = torch.Generator().manual_seed(1000)
        row["quality"] = float(torch.stack([loss_on(text[cut:], own) for _ in range(20)]).mean())
    return row


def train_model(model: Any, plain: Any, loss_of: Any, compression: Any, steps: int) -> dict[str, float]:
    """Loss over the last tenth of the steps and all ranks; bytes and time per step over the second half."""
    import statistics
    import time

    import torch

    import horoclone.torch as hvd
    from horoclone.runtime import native

    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compression)
    losses, times, before = [], [], 0
    for step in range(steps):
        if step == steps // 2:
            before = json.loads(native().counters())["mesh"]["bytes_sent"]
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        times.append(time.perf_counter() - began)
    sent = json.loads(native().counters())["mesh"]["bytes_sent"] - before
    hvd.barrier()
    last = torch.stack(losses[-max(1, steps // 10) :]).mean()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = hvd.allgather(flat.view(1, -1))
    if not all(torch.equal(row, rows[0]) for row in rows):
        raise RuntimeError("the ranks ended with different parameters")
    return {
        "parameters": flat.numel(),
        "loss": hvd.allreduce(last).item(),
        "bytes": hvd.allreduce(torch.tensor(float(sent)), op=hvd.Max).item() / (steps - steps // 2),
        "step_ms": 1000 * statistics.median(times[steps // 2 :]),
    }


if __name__ == "__main__":
    sys.exit(main())
