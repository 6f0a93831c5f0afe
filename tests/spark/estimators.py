"""Cases with estimators, see cases.py: each runs in the driver."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from cases import failure_of


def backend(**more: Any) -> Any:
    from horoclone.spark.common.backend import SparkBackend

    return SparkBackend(2, stdout=io.StringIO(), stderr=io.StringIO(), **more)


def store(folder: str, **more: Any) -> Any:
    from horoclone.spark.common.store import Store

    return Store.create(folder, **more)


def lines(spark: Any, count: int = 203) -> Any:
    """y = a + 2 b - c, exactly. Columns of all kinds: vectors, an array, numbers, a weight, a mark for validation."""
    from pyspark.ml.linalg import Vectors

    random = np.random.default_rng(0)
    rows = []
    for index in range(count):
        a, b, c = (float(one) for one in random.normal(size=3))
        x = Vectors.dense([a, b]) if index % 2 else Vectors.sparse(2, {0: a, 1: b})
        rows.append((x, [c, 0.0], a + 2 * b - c, int(index), 1.0 if index % 5 else 0.0, index % 4 == 0))
    return spark.createDataFrame(rows, ["x", "more", "y", "row", "weight", "held"])


def linear() -> Any:
    import torch

    class Linear(torch.nn.Module):  # of a script: it has to travel by value
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, bias=False)

        def forward(self, x: Any, more: Any) -> Any:
            return self.first(x) + self.second(more)

    torch.manual_seed(1)
    return Linear()


def torch_estimator(folder: str, **changes: Any) -> Any:
    import torch

    from horoclone.spark.torch import TorchEstimator

    model, trained = changes.pop("model", None) or linear(), linear()
    given = {
        "backend": backend(),
        "store": store(folder),
        "model": model,
        "optimizer": torch.optim.SGD((trained if isinstance(model, str) else model).parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x", "more"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 5,
        "verbose": 0,
        **changes,
    }
    return TorchEstimator(**{name: value for name, value in given.items() if value != "absent"})


def torch_whole_way(spark: Any, folder: str) -> Any:
    import torch

    from horoclone.spark.torch import TorchModel

    frame = lines(spark)
    estimator = torch_estimator(
        folder,
        validation="held",
        sample_weight_col="weight",
        metrics=[lambda output, label: (output - label).abs().mean()],
        input_shapes=[[-1, 2], [-1, 2]],
        run_id="one",
        compress_sparse_cols=True,
    )
    fitted = estimator.fit(frame)
    rows = fitted.transform(frame).collect()
    apart = max(abs(row.y__output - row.y) for row in rows)
    path = os.path.join(folder, "saved")
    fitted.write().overwrite().save(path)
    loaded = TorchModel.load(path).setOutputCols(["guess"])
    again = loaded.transform(frame.select("x", "more")).collect()
    estimator.save(os.path.join(folder, "estimator"))
    same = type(estimator).load(os.path.join(folder, "estimator"))
    resumed = estimator.setEpochs(1).fit(frame)  # the run exists: it goes on from its checkpoint
    history = fitted.getHistory()
    return {
        "apart": apart,
        "again": max(abs(one.guess - row.y__output) for one, row in zip(again, rows, strict=True)),
        "columns": list(rows[0].asDict()),
        "losses": [one["train"]["loss"] for one in history],
        "validation": [one["validation"]["all_metrics"][0]["group_0_y"] for one in history],
        "resumed": resumed.getHistory()[0]["train"]["loss"],
        "rate": fitted.getOptimizer().param_groups[0]["lr"],
        "loaded": [
            same.getBatchSize(),
            same.getFeatureCols(),
            type(same.getLoss()).__name__,
            same.getStore(),
        ],
        "left": sorted(os.listdir(folder)),
        "module": isinstance(fitted.getModel(), torch.nn.Module),
    }


def torch_on_parquet(spark: Any, folder: str) -> Any:
    frame, here = lines(spark), Path(folder)
    arrays = frame.drop("x", "held").withColumnRenamed("more", "x")
    arrays.repartition(3).write.parquet(str(here / "train"))
    arrays.limit(20).write.parquet(str(here / "val"))
    arrays.limit(0).write.parquet(str(here / "empty"))
    (here / "text").mkdir()
    (here / "text" / "a.parquet").write_text("no parquet")

    import torch

    def estimator(train: str, **more: Any) -> Any:
        model = torch.nn.Linear(2, 1)
        return torch_estimator(
            str(here / "own"),
            model=model,
            store=store(
                str(here / "own"), train_path=str(here / train), val_path=str(here / "val"), save_runs=False
            ),
            feature_cols=["x"],
            **more,
        )

    seen = estimator("train", validation=0.1, epochs=3, inmemory_cache_all=True)
    fitted = seen.fit_on_parquet()
    weights = fitted.getModel().weight.detach().tolist()[0]
    return {
        "losses": [one["train"]["loss"] for one in fitted.getHistory()],
        "validated": ["validation" in one for one in fitted.getHistory()],
        "weights": weights,
        "missing": failure_of(lambda: estimator("nowhere").fit_on_parquet()),
        "empty": failure_of(lambda: estimator("empty").fit_on_parquet()),
        "no parquet": failure_of(lambda: estimator("text").fit_on_parquet()),
        "other columns": failure_of(lambda: estimator("train", label_cols=["z"]).fit_on_parquet()),
        "other sizes": failure_of(lambda: estimator("train", input_shapes=[[-1, 3]]).fit_on_parquet()),
    }


def torch_transformed(spark: Any, folder: str) -> Any:
    """A transformation makes a column, and a step of one's own counts batches; the losses are made on the ranks."""
    import torch

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "both": np.array([*row["x"], row["more"][0]]),
            "y": row["y"],
            "x": row["x"],
            "more": row["more"],
        }

    def step(
        model: Any, optimizer: Any, outputs_of: Any, loss_fn: Any, inputs: Any, labels: Any, weights: Any
    ) -> Any:
        optimizer.zero_grad()
        outputs, labels = outputs_of(model(torch.cat([*inputs], dim=1)), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    def make_loss(**_: Any) -> Any:
        return torch.nn.functional.l1_loss

    model = torch.nn.Linear(4, 1)
    fitted = torch_estimator(
        folder,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss=None,
        loss_constructors=[make_loss],
        train_minibatch_fn=step,
        transformation_fn=doubled,
        transformation_removed_fields=["both"],
        train_steps_per_epoch=3,
        backward_passes_per_step=1,
        epochs=2,
        shuffle=False,
    ).fit(lines(spark, 64))
    return [one["train"]["loss"] for one in fitted.getHistory()]


def torch_errors(spark: Any, folder: str) -> Any:
    frame = lines(spark, 20)

    def said(**changes: Any) -> Any:
        return failure_of(lambda: torch_estimator(folder, **changes).fit(frame))

    from horoclone.spark.common.params import ESTIMATOR_TABLE
    from horoclone.spark.torch import TorchEstimator

    other = frame.withColumn("more", frame["more"]).unionAll(
        spark.createDataFrame([(frame.first().x, [1.0], 1.0, 1, 1.0, True)], frame.schema)
    )
    nulls = spark.createDataFrame([(frame.first().x, [1.0, 2.0], None, 1, 1.0, True)] * 8, frame.schema)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ignored = failure_of(
            lambda: torch_estimator(
                folder, reader_pool_type="process", train_reader_num_workers=3, loss="absent"
            ).fit(frame)
        )
        torch_estimator(folder, reader_pool_type="process", train_reader_num_workers=3)._ready()
    made = TorchEstimator()
    pairs = [
        (
            row.accessor,
            getattr(made, f"set{row.accessor}")(None) is made,
            getattr(made, f"get{row.accessor}")(),
        )
        for row in ESTIMATOR_TABLE
    ]
    return {
        "found": {
            "model": said(model="no model"),
            "no model": said(model="absent"),
            "loss": said(loss="absent"),
            "optimizer": said(optimizer="absent"),
            "store": said(store="absent"),
            "feature_cols": said(feature_cols="absent"),
            "missing column": said(feature_cols=["x", "nothing"]),
            "both": failure_of(lambda: torch_estimator(folder, loss_constructors=[print])),
            "num_proc": said(num_proc=2),
            "validation": said(validation=1.5),
            "no validation": said(validation="nothing"),
            "batch": said(batch_size=0),
            "data_module": said(data_module=object()),
            "shapes": failure_of(lambda: torch_estimator(folder).fit(other)),
            "nulls": failure_of(lambda: torch_estimator(folder).fit(nulls)),
            "fails": said(loss=lambda output, label: 1 / 0),
        },
        "ignored": ignored,
        "warned": [str(one.message) for one in heard if "petastorm" in str(one.message)],
        "accessors": [pair for pair in pairs if pair[1:] != (True, None)],
        "count": len(made.params),
        "left": sorted(os.listdir(folder)),
    }


def keras_whole_way(spark: Any, folder: str) -> Any:
    import keras

    from horoclone.spark.keras import KerasEstimator, KerasModel

    frame = lines(spark)
    keras.utils.set_random_seed(3)
    x, more = keras.Input((2,), name="x"), keras.Input((2,), name="more")
    output = keras.layers.Add()([keras.layers.Dense(1)(x), keras.layers.Dense(1, use_bias=False)(more)])
    model = keras.Model([x, more], output)
    estimator = KerasEstimator(
        backend=backend(),
        store=store(folder),
        model=model,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        metrics=["mae", keras.metrics.MeanSquaredError(name="square")],
        feature_cols=["x", "more"],
        label_cols=["y"],
        sample_weight_col="weight",
        validation=0.2,
        batch_size=16,
        epochs=4,
        random_seed=5,
        verbose=0,
        run_id="two",
        callbacks=[keras.callbacks.TerminateOnNaN()],
        checkpoint_callback=keras.callbacks.ModelCheckpoint(
            "anywhere.keras", monitor="val_loss", save_best_only=True
        ),
    )
    fitted = estimator.fit(frame)
    rows = fitted.transform(frame).collect()
    path = os.path.join(folder, "saved")
    fitted.write().overwrite().save(path)
    again = KerasModel.load(path).transform(frame).collect()
    estimator.save(os.path.join(folder, "estimator"))
    loaded = KerasEstimator.load(os.path.join(folder, "estimator"))
    resumed = estimator.setEpochs(1).setCheckpointCallback(None).fit(frame)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    estimator.setOptimizer(keras.optimizers.SGD(schedule)).setRunId("with a schedule")
    scheduled = [estimator.fit(frame).getHistory()["loss"][0] for _ in range(2)]
    history = fitted.getHistory()

    def said(**changes: Any) -> Any:
        given = {
            "backend": backend(),
            "store": store(folder),
            "model": model,
            "loss": "mse",
            "optimizer": "sgd",
        }
        columns = {"feature_cols": ["x", "more"], "label_cols": ["y"]}
        wanted = {**given, **columns, **changes}
        return failure_of(
            lambda: KerasEstimator(**{n: v for n, v in wanted.items() if v != "absent"}).fit(frame)
        )

    return {
        "apart": max(abs(row.y__output - row.y) for row in rows),
        "again": max(abs(one.y__output - row.y__output) for one, row in zip(again, rows, strict=True)),
        "history": {name: len(values) for name, values in history.items()},
        "losses": history["loss"],
        "resumed": resumed.getHistory()["loss"],
        "scheduled": scheduled,
        "loaded": [
            type(loaded.getModel()).__name__,
            type(loaded.getOptimizer()).__name__,
            loaded.getMetrics()[0],
        ],
        "found": {
            "model": said(model="no model"),
            "no model": said(model="absent"),
            "loss": said(loss="absent"),
            "optimizer": said(optimizer="absent"),
            "columns": said(feature_cols=["x"]),
            "sizes": said(feature_cols=["x", "y"]),
            "unbuilt": said(model=keras.Sequential([keras.layers.Dense(1)])),
        },
        "left": sorted(os.listdir(folder)),
    }
