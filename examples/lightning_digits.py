"""Lightning 2: `import horoclone.lightning`, and Trainer(strategy="horoclone") trains on every rank.

horoclonerun -np 2 python examples/lightning_digits.py
"""

import argparse
import logging
import tempfile
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import horoclone.lightning  # noqa: F401 - registers the strategy

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Digits(pl.LightningModule):
    """A small network on scikit-learn's digits; nothing in it knows about ranks."""

    def __init__(self, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # the mean over all ranks
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    train, test = random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    checkpoint = ModelCheckpoint(monitor="accuracy", mode="max")
    trainer = pl.Trainer(
        strategy="horoclone", accelerator="cpu", max_epochs=args.epochs, callbacks=[checkpoint], gradient_clip_val=5.0,
        default_root_dir=tempfile.mkdtemp(prefix="digits-"), logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Digits()
    trainer.fit(model, DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, 100))

    loss = trainer.callback_metrics["loss"].item()
    best = trainer.strategy.broadcast(checkpoint.best_model_path)  # written by rank 0
    (result,) = trainer.validate(model, DataLoader(test, 100), ckpt_path=best, verbose=False)
    sums = trainer.strategy.all_gather(model.layers[1].weight.detach().sum().view(1))
    if trainer.is_global_zero:
        same = len(sums.unique()) == 1
        print(
            f"{trainer.world_size} ranks, loss {loss:.4f}, best accuracy {result['accuracy']:.4f}, same weights: {same}"
        )


if __name__ == "__main__":
    main()
