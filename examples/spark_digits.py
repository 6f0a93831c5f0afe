"""From a DataFrame to a trained model to predictions: scikit-learn's scanned digits on Spark, beside scikit-learn.

    python examples/spark_digits.py                                  # two ranks on two cores of this machine
    python examples/spark_digits.py --master local-cluster[2,1,1024] # two executors, each a process of its own
    spark-submit examples/spark_digits.py --master spark://host:7077 --work-dir s3://bucket/digits

The training data and the checkpoints lie in --work-dir, which all nodes must reach.
"""

import argparse
import os
import sys
import tempfile

import numpy as np
import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql.functions import array_max, array_position
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from horoclone.spark.common.store import Store
from horoclone.spark.torch import TorchEstimator, TorchModel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--work-dir", help="default: a new temporary folder")
    parser.add_argument(
        "--margin", type=float, default=0.01, help="by which accuracy may be below scikit-learn's"
    )
    return parser.parse_args()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, label.long())


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label.long()).float().mean()


def scikit_learns_accuracy(train, test) -> float:
    """Of a logistic regression, on the same rows."""
    parts = [
        (np.array([row.features.toArray() for row in rows]), np.array([row.label for row in rows]))
        for rows in (train.collect(), test.collect())
    ]
    return LogisticRegression(max_iter=1000).fit(*parts[0]).score(*parts[1])


def main() -> None:
    args = arguments()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the executors' Python: this one
    spark = SparkSession.builder.master(args.master).appName("digits").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [(Vectors.dense(image / 16), int(label)) for image, label in zip(images, labels, strict=True)]
    frame = spark.createDataFrame(rows, ["features", "label"])
    train, test = (part.cache() for part in frame.randomSplit([0.8, 0.2], seed=1))

    folder = args.work_dir or tempfile.mkdtemp(prefix="digits-")
    model = network()
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(folder),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=loss,
        metrics=[accuracy],
        feature_cols=["features"],
        label_cols=["label"],
        input_shapes=[[-1, 1, 8, 8]],
        validation=0.1,
        batch_size=16,
        epochs=args.epochs,
        random_seed=3,
    )
    trained = estimator.fit(train)
    trained.write().overwrite().save(f"{folder}/model")

    predicted = TorchModel.load(f"{folder}/model").setOutputCols(["scores"]).transform(test)
    scores = vector_to_array("scores")
    guess = (array_position(scores, array_max(scores)) - 1).cast("double")
    evaluator = MulticlassClassificationEvaluator(
        predictionCol="guess", labelCol="label", metricName="accuracy"
    )
    ours = evaluator.evaluate(predicted.withColumn("guess", guess))
    theirs = scikit_learns_accuracy(train, test)
    last = trained.getHistory()[-1]
    print(f"epoch {last['epoch'] + 1}: {last['train']}, validation {last['validation']}")
    print(
        f"test accuracy {ours:.2%} after {args.epochs} epochs on {args.num_proc} ranks; scikit-learn {theirs:.2%}"
    )
    spark.stop()
    if ours < theirs - args.margin:
        raise SystemExit("that is too low")


if __name__ == "__main__":
    main()
