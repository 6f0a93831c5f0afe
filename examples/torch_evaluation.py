"""Exact metrics over a test set that is not divisible: each rank tests its share, counts and predictions are combined.

DistributedSampler repeats samples to even the shares out, which falsifies metrics; hvd.EvaluationSampler does not.
    horoclonerun -np 2 python examples/torch_evaluation.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--test-size", type=int, default=361, help="of 1,797 images; odd, so shares differ")
    parser.add_argument("--epochs", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    order = torch.randperm(len(images))
    test, train = order[: args.test_size], order[args.test_size :]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=5e-3), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    own = train[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    for _ in range(args.epochs):
        for batch in own.split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()

    share = test[hvd.EvaluationSampler(test)[:]]
    with torch.no_grad():
        scores = model(images[share])
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    confusion.index_put_((labels[share], scores.argmax(1)), torch.tensor(1), accumulate=True)
    confusion = hvd.metric_sum(confusion)
    loss = hvd.metric_mean(F.cross_entropy(scores, labels[share]), count=len(share))
    shares = hvd.allgather_object(len(share))
    # Predictions can be gathered, too; they come in the order of the test set.
    predictions = hvd.allgather(scores.argmax(1), name="predictions")

    if hvd.rank() == 0:
        with torch.no_grad():  # the same on one rank alone
            alone = model(images[test])
        right = (alone.argmax(1) == labels[test]).sum().item()
        assert int(confusion.sum()) == len(test)
        assert int(confusion.trace()) == right, "distributed and local accuracy differ"
        assert torch.equal(predictions, alone.argmax(1))
        recall = (confusion.diagonal() / confusion.sum(1)).min()
        print(
            f"shares {shares}: {right} of {len(test)} right, accuracy {right / len(test):.2%}, loss {loss:.4f}"
        )
        print(f"accuracy {right / len(test):.4f}, worst recall {recall:.4f}, equal to one rank's: True")


if __name__ == "__main__":
    main()
