"""A rank of a TorchEstimator: trains the model that it was sent on its rows. Rank 0 keeps checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

import horoclone.torch as hvd
from horoclone.spark.data.reading import Batch
from horoclone.spark.training import Epochs, Plan

LOG_EVERY = 100  # batches between two lines with verbose=2
Shapes = Sequence[Sequence[int]] | None


@dataclass
class Learner:
    """What is trained, and with what. The optimizer is that of this model's parameters: both are pickled together."""

    model: Any
    optimizer: Any
    losses: Sequence[Callable[..., Any]] | None
    loss_constructors: Sequence[Callable[..., Any]] | None
    loss_weights: Sequence[float] | None
    metrics: Sequence[Any]
    compression: Any
    passes_per_step: int
    minibatch: Callable[..., Any] | None
    input_shapes: Shapes


def train(plan: Plan, packed: bytes, checkpoint: bytes | None) -> tuple[list[dict[str, Any]], bytes]:
    """packed: a Learner. checkpoint: to go on from. Rank 0's value is (history, state of model and optimizer)."""
    hvd.init()
    learner: Learner = cloudpickle.loads(packed)
    if plan.is_seeded:
        torch.manual_seed(plan.seed)
    return _Rank(plan, learner, checkpoint).run()


class _Rank:
    def __init__(self, plan: Plan, learner: Learner, checkpoint: bytes | None) -> None:
        self._plan, self._learner = plan, learner
        self._device = torch.device("cpu")
        if plan.use_gpu and torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
            self._device = torch.device("cuda")
        self._model = learner.model.to(self._device)
        self._base = learner.optimizer
        if checkpoint is not None:
            _load(self._model, self._base, checkpoint)
        for group in self._base.param_groups:
            group["lr"] = group["lr"] * hvd.size()
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self._base, root_rank=0)
        wrap = {"compression": learner.compression} if learner.compression is not None else {}
        self._optimizer = hvd.DistributedOptimizer(
            self._base,
            named_parameters=self._model.named_parameters(),
            backward_passes_per_step=learner.passes_per_step,
            **wrap,
        )
        self._losses = _losses(learner, self._model, self._optimizer, plan)
        self._minibatch = learner.minibatch or minibatch
        self._writer = _log_writer(plan)

    def run(self) -> tuple[list[dict[str, Any]], bytes]:
        plan, rank, size = self._plan, hvd.rank(), hvd.size()
        train_rows, val_rows = plan.train_rows(rank, size), plan.val_rows(rank, size)
        training = Epochs(train_rows, plan.batch_size, plan.steps)
        validating = None if val_rows is None else Epochs(val_rows, plan.val_batch_size, plan.val_steps)
        history, state = [], b""
        for epoch in range(plan.epochs):
            record: dict[str, Any] = {"epoch": epoch, "train": self._epoch(training, epoch, True)}
            if validating is not None:
                with torch.no_grad():
                    record["validation"] = self._epoch(validating, epoch, False)
            history.append(record)
            if rank == 0:
                state = self._keep(record)
        if self._writer is not None:
            self._writer.close()
        return history, state

    def _epoch(self, epochs: Epochs, epoch: int, is_training: bool) -> dict[str, Any]:
        self._model.train(is_training)
        means = _Means()
        for index, batch in enumerate(epochs.batches(epoch)):
            inputs, labels, weights = self._tensors(batch)
            if is_training:
                outputs, loss = self._minibatch(
                    self._model, self._optimizer, paired, self._loss, inputs, labels, weights
                )
                outputs, labels = paired(outputs, labels)
            else:
                outputs, labels = paired(self._model(*inputs), labels)
                loss = self._loss(outputs, labels, weights)
            means.add("loss", loss)
            for name, value in measured(self._learner.metrics, self._plan.labels, outputs, labels):
                means.add(name, value)
            if self._plan.verbose >= 2 and hvd.rank() == 0 and index % LOG_EVERY == 0:
                print(f"epoch {epoch}, batch {index} of {epochs.steps}: loss {float(loss.detach()):.4g}")
        found = means.over_all_ranks()
        groups = [
            {name: found[name] for name in found if name.startswith(f"group_{number}_")}
            for number in range(len(self._learner.metrics))
        ]
        return {"loss": found["loss"], "all_metrics": groups}

    def _tensors(self, batch: Batch) -> tuple[list[Any], list[Any], Any]:
        plan = self._plan
        inputs = [
            self._shaped(batch[name], self._learner.input_shapes, at) for at, name in enumerate(plan.features)
        ]
        labels = [self._shaped(batch[name], plan.label_shapes, at) for at, name in enumerate(plan.labels)]
        weights = None if plan.weight is None else self._tensor(batch[plan.weight])
        return inputs, labels, weights

    def _shaped(self, values: Any, shapes: Shapes, at: int) -> Any:
        tensor = self._tensor(values)
        return tensor if shapes is None else tensor.reshape(tuple(shapes[at]))

    def _tensor(self, values: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(self._device)

    def _loss(self, outputs: Sequence[Any], labels: Sequence[Any], weights: Any = None) -> Any:
        return weighted_loss(outputs, labels, self._losses, self._learner.loss_weights, weights)

    def _keep(self, record: dict[str, Any]) -> bytes:
        """Rank 0, behind an epoch: the checkpoint, with the learning rate of one rank."""
        plan = self._plan
        if plan.verbose:
            print(record)
        state = {"model": self._model.state_dict(), "optimizer": _with_rates(self._base, 1 / hvd.size())}
        content = _saved(_on_cpu(state))
        if plan.checkpoint_path is not None:
            plan.store.write(plan.checkpoint_path, content)
        if self._writer is not None:
            for stage in ("train", "validation"):
                for name, value in _flat(record.get(stage, {})):
                    self._writer.add_scalar(f"{stage}/{name}", value, record["epoch"])
        return content


class _Means:
    """Averages over the batches of all ranks, each of which has as many."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(torch.as_tensor(value).detach())
        self._counts[name] = self._counts.get(name, 0) + 1

    def over_all_ranks(self) -> dict[str, float]:
        names = sorted(self._sums)
        mine = torch.tensor([self._sums[name] / self._counts[name] for name in names], dtype=torch.float64)
        found = hvd.allreduce(mine, name="horoclone.spark.metrics")
        return dict(zip(names, found.tolist(), strict=True))


def minibatch(
    model: Any,
    optimizer: Any,
    transform_outputs: Any,
    loss_fn: Any,
    inputs: Any,
    labels: Any,
    sample_weights: Any,
) -> tuple[Any, Any]:
    """A step of training; train_minibatch_fn takes its place. Gives (outputs, loss)."""
    optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    loss.backward()
    optimizer.step()
    return outputs, loss


def paired(outputs: Any, labels: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Outputs as a list, and the labels in their shapes where the numbers of elements are alike."""
    found = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    shaped = [
        label.reshape(output.shape)
        if hasattr(output, "shape") and output.shape.numel() == label.shape.numel()
        else label
        for output, label in zip(found, labels, strict=False)
    ]
    return found, shaped


def weighted_loss(
    outputs: Sequence[Any],
    labels: Sequence[Any],
    losses: Sequence[Callable[..., Any]],
    loss_weights: Sequence[float] | None,
    weights: Any = None,
) -> Any:
    """The sum over the outputs. With weights of rows, each row's loss times its weight, and the mean over the batch:
    a loss is then called with reduction="none", and gives one number for each row, or several."""
    functions = list(losses) * len(outputs) if len(losses) == 1 else losses
    parts = loss_weights or [1.0 / len(labels)] * len(labels)
    total: Any = 0.0
    for output, label, function, part in zip(outputs, labels, functions, parts, strict=False):
        if weights is None:
            total = total + function(output, label) * part
        else:
            rows = function(output, label, reduction="none").reshape(len(weights), -1).mean(dim=1)
            total = total + (rows * weights).mean() * part
    return total


def measured(
    metrics: Sequence[Any], label_names: Sequence[str], outputs: Sequence[Any], labels: Sequence[Any]
) -> list[tuple[str, Any]]:
    """metrics: functions of (output, label), or groups of them: one for all outputs, or one for each. Gives names like
    `group_0_label` with values."""
    found = []
    for number, group in enumerate(metrics):
        functions = list(group) if isinstance(group, (list, tuple)) else [group]
        functions = functions * len(outputs) if len(functions) == 1 else functions
        for name, function, output, label in zip(label_names, functions, outputs, labels, strict=False):
            value = function(output.detach(), label)
            found.append((f"group_{number}_{name}", torch.as_tensor(value, dtype=torch.float64).mean()))
    return found


def _losses(learner: Learner, model: Any, optimizer: Any, plan: Plan) -> Sequence[Callable[..., Any]]:
    if learner.loss_constructors:
        given: Mapping[str, Any] = {"model": model, "optimizer": optimizer, "hvd": hvd, "plan": plan}
        return [make(**given) for make in learner.loss_constructors]
    return list(learner.losses or ())


def _with_rates(optimizer: Any, factor: float) -> dict[str, Any]:
    """The optimizer's state with other learning rates."""
    state = optimizer.state_dict()
    groups = [{**group, "lr": group["lr"] * factor} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _on_cpu(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(one) for one in value)
    return value


def _saved(state: Any) -> bytes:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def _load(model: Any, optimizer: Any, content: bytes) -> None:
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _flat(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    groups = [item for group in record.get("all_metrics", ()) for item in group.items()]
    return [*([("loss", record["loss"])] if "loss" in record else []), *groups]


def _log_writer(plan: Plan) -> Any:
    """TensorBoard's, on rank 0, where it is installed and the store is a local folder."""
    folder = plan.store.get_logs_path(plan.run_id)
    if hvd.rank() != 0 or folder is None or not folder.startswith("file://"):
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(plan.store.get_localized_path(folder))
