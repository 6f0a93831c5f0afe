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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import Load, facts, only_one  # noqa: E402

TASKS = {"digits": "test accuracy", "text": "held-out loss"}
COMPRESSORS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8 without feedback",
    "powersgd",
    "topk",
    "topk without feedback",
)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    import horoclone
    from horoclone.launch.api import RunError

    arguments = parse(argv)
    with only_one():
        load = Load()
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HOROCLONE_SHARED_MEMORY": "0"}
        plan = (arguments.tasks, arguments.compressors, arguments.steps, str(HERE.parent / "examples"))
        try:
            rows = horoclone.run(train_all, plan, np=arguments.np, env=environment)[0]
        except RunError as error:
            print(f"compression.py: {error}", file=sys.stderr)
            return 1
        others = load.others()
    result = {"ranks": arguments.np, "machine": facts(), "others": others, "rows": rows}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(result)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each training (300)")
    parser.add_argument("--tasks", type=one_of(TASKS), default=list(TASKS), help=",".join(TASKS))
    parser.add_argument("--compressors", type=one_of(COMPRESSORS), default=list(COMPRESSORS), help="a,b,...")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args(argv)
    if arguments.np < 2 or arguments.steps < 20:
        parser.error("--np must be at least 2 and --steps at least 20")
    return arguments


def one_of(known: Any) -> Any:
    def words_of(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are {', '.join(known)}")
        return words

    return words_of


def print_table(result: dict[str, Any]) -> None:
    """One table per task, in Markdown."""
    busy = "unknown" if result["others"] is None else f"{result['others']:.2f}"
    machine = result["machine"]
    print(
        f"{result['ranks']} ranks; {machine['cores']} cores, {machine['processor']}; others used {busy} cores"
    )
    for task, quality in TASKS.items():
        rows = [row for row in result["rows"] if row["task"] == task]
        if not rows:
            continue
        whole = next((row["bytes"] for row in rows if row["compressor"] == "none"), None)
        print(f"\n{task}, {rows[0]['parameters']:,} parameters, {rows[0]['steps']} steps\n")
        print(
            f"| compression | loss at the end | {quality} | KB sent per rank and step | share | ms per step |"
        )
        print("|---|---|---|---|---|---|")
        for row in rows:
            share = f"{row['bytes'] / whole:.3f}" if whole else ""
            kb, ms = f"{row['bytes'] / 1e3:.1f}", f"{row['step_ms']:.1f}"
            print(
                f"| {row['compressor']} | {row['loss']:.4f} | {row['quality']:.4f} | {kb} | {share} | {ms} |"
            )


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
