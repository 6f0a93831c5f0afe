"""The same weights, to the bit, on any number of processes: 8 virtual ranks, shared out over those that are there.

Ranks that die or join change nothing either; compare what these print:
    horoclonerun -np 2 python examples/torch_virtual_ranks.py
    horoclonerun -np 3 --min-np 1 -H localhost:3 python examples/torch_virtual_ranks.py
"""

import argparse
import hashlib
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual", type=int, default=8, help="virtual ranks")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="after each step, to have time to kill a rank"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    digits = torch.utils.data.TensorDataset(images.float() / 16, labels)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    virtual = hvd.VirtualRanks(model, size=args.virtual)
    data = virtual.loader(digits, batch_size=16)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        print(f"step {state.step}: virtual ranks {list(virtual.mine)} of {virtual.size}", flush=True)
        while state.step < args.steps:
            for rank in virtual.ranks(state.step):
                inputs, targets = data.batch(rank, state.step)
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            time.sleep(args.pause_s)

    train(state)
    if hvd.rank() == 0:
        weights = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
        print(f"after {args.steps} steps: sha256 {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
