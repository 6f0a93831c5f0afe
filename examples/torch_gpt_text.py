"""A character-level transformer, trained on the sources of Python's standard library: text that every machine has.

Gradient accumulation (gradients are reduced once in several backward passes) and bfloat16 autocast.
    horoclonerun -np 2 python examples/torch_gpt_text.py --steps 40
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import horoclone.torch as hvd

SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))  # everything else is left out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and pass")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text")
    parser.add_argument("--compress", action="store_true", help="send gradients as bfloat16")
    parser.add_argument("--sample", type=int, default=0, help="characters to write at the end")
    return parser.parse_args()


def library_text(megabytes: float) -> torch.Tensor:
    """The standard library as numbers of symbols, file by file in order of name; the same on every rank."""
    number = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    numbers: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        numbers.extend(number[c] for c in path.read_text(errors="ignore").expandtabs() if c in number)
        if len(numbers) > megabytes * 1e6:
            break
    return torch.tensor(numbers, dtype=torch.uint8)


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.before_mlp(x))


class Transformer(torch.nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.context = args.context
        self.symbol = torch.nn.Embedding(len(SYMBOLS), args.width)
        self.place = torch.nn.Embedding(args.context, args.width)
        self.blocks = torch.nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm = torch.nn.LayerNorm(args.width)
        self.head = torch.nn.Linear(args.width, len(SYMBOLS), bias=False)
        self.head.weight = self.symbol.weight  # shared: its gradient comes from both ends

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.symbol(symbols) * self.symbol.embedding_dim**0.5 / 4 + self.place.weight[: symbols.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, count: int) -> str:
        symbols = torch.zeros((1, 1), dtype=torch.long)
        for _ in range(count):
            chances = F.softmax(self(symbols[:, -self.context :])[:, -1].float(), dim=-1)
            symbols = torch.cat([symbols, torch.multinomial(chances, 1)], dim=1)
        return "".join(SYMBOLS[i] for i in symbols[0, 1:].tolist())


def batch(
    text: torch.Tensor, args: argparse.Namespace, chance: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - args.context - 1, (args.batch_size,), generator=chance)
    rows = torch.stack([text[s : s + args.context + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(1000 + hvd.rank())  # every rank draws its own sequences
    text = library_text(args.megabytes)
    model = Transformer(args)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02 if parameter is not model.symbol.weight else 0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95)),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accumulate,
        compression=hvd.Compression.bf16 if args.compress else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if hvd.rank() == 0:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{len(text) / 1e6:.1f} million characters, {count / 1e6:.2f} million parameters, {hvd.size()} ranks"
        )

    tokens_per_report = 10 * args.accumulate * args.batch_size * args.context
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        total = 0.0
        for _ in range(args.accumulate):
            inputs, targets = batch(text, args, chance)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = model(inputs)
            loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten()) / args.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            mean = hvd.allreduce(torch.tensor(total), name="loss").item()
            rate = torch.tensor(tokens_per_report / (time.perf_counter() - began))
            rates = hvd.allgather(rate.view(1), name="rate")
            if hvd.rank() == 0:
                each = ", ".join(f"{r:,.0f}" for r in rates.tolist())
                print(
                    f"step {step}: loss {mean:.3f}; tokens/s per rank {each}; in all {rates.sum():,.0f}",
                    flush=True,
                )
            began = time.perf_counter()
    if args.sample and hvd.rank() == 0:
        print(model.write(args.sample))


if __name__ == "__main__":
    main()
