"""Under Horovod's name: what the estimators and the models for all frameworks have in common."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark.ml import Estimator, Model

from horoclone.errors import Unsupported
from horoclone.spark.common.backend import SparkBackend
from horoclone.spark.common.params import PETASTORMS, EstimatorParams, ModelParams
from horoclone.spark.common.store import FilesystemStore
from horoclone.spark.data.columns import SCALAR, VECTOR, Column
from horoclone.spark.data.preparing import Dataset, Wanted, found, written
from horoclone.spark.data.reading import Transformation
from horoclone.spark.training import Plan

_MAX_SEED = 1 << 31


class HorovodEstimator(Estimator, EstimatorParams):
    """fit() trains on a DataFrame, fit_on_parquet() on what lies in the store; both give a model."""

    _run_prefix = "run"

    def fit_on_parquet(self, params: Any = None) -> Any:
        """Trains on the Parquet at store.get_train_data_path(), with that at get_val_data_path() for validation where
        the parameter validation is set. ValueError where it is missing, empty or has other columns."""
        return (self.copy(params) if params else self)._fit_on_parquet()

    def _fit_on_parquet(self) -> Any:
        backend, seed = self._ready(), self._seed()
        return self._train(backend, found(self.getStore(), self._wanted(backend, seed)), seed)

    def _fit(self, dataset: Any) -> Any:
        backend, seed = self._ready(), self._seed()
        with written(dataset, self.getStore(), self._wanted(backend, seed)) as data:
            return self._train(backend, data, seed)

    # --- for the estimators of the frameworks

    def _check_framework_params(self) -> None:
        """ValueError that names a parameter that is missing or wrong."""
        raise NotImplementedError

    def _check_columns(self, columns: dict[str, Column]) -> None:
        """ValueError where they do not fit the model."""
        raise NotImplementedError

    def _trainer(self, plan: Plan, checkpoint: bytes | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function for every rank, and its arguments. Rank 0's value goes to _model_of()."""
        raise NotImplementedError

    def _model_of(self, value: Any, run_id: str, columns: dict[str, Column]) -> Any:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {}

    # --- the way there

    def _ready(self) -> Any:
        """The backend. ValueError, or Unsupported, for parameters that cannot be."""
        self._check_params()
        self._check_framework_params()
        for name in ("data_module", "continuous_cols", "categorical_cols"):
            if self.getOrDefault(name):
                raise Unsupported(
                    f"{type(self).__name__}: {name} is not supported. Data is read from Parquet by pyarrow; leave it "
                    "out, and give all columns in feature_cols."
                )
        unused = [name for name in PETASTORMS if self.isSet(name) and self._says_something(name)]
        if unused:
            warnings.warn(
                f"{', '.join(unused)}: no effect here, since pyarrow reads the data and not petastorm "
                "(shuffle=False switches shuffling off)",
                stacklevel=4,
            )
        backend = self.getBackend()
        if backend is not None and self.getNumProc() is not None:
            raise ValueError("num_proc and backend both say how many ranks there are; give one of them")
        return backend or SparkBackend(self.getNumProc())

    def _says_something(self, name: str) -> bool:
        return self.getOrDefault(name) not in (None, self._defaultParamMap.get(self.getParam(name)))

    def _seed(self) -> int:
        seed = self.getRandomSeed()
        return secrets.randbelow(_MAX_SEED) if seed is None else int(seed)

    def _wanted(self, backend: Any, seed: int) -> Wanted:
        return Wanted(
            features=self.getFeatureCols(),
            labels=self.getLabelCols(),
            weight=self.getSampleWeightCol(),
            validation=self.getValidation(),
            seed=seed,
            ranks=backend.num_processes(),
            compress=self.getCompressSparseCols(),
        )

    def _train(self, backend: Any, data: Dataset, seed: int) -> Any:
        if self.getTransformationFn() is None:
            self._check_columns(data.columns)
        run_id = self.getRunId() or f"{self._run_prefix}_{int(time.time())}_{secrets.token_hex(3)}"
        plan = self._plan(data, seed, run_id)
        checkpoint = None
        if plan.checkpoint_path and plan.store.exists(plan.checkpoint_path):
            checkpoint = plan.store.read(plan.checkpoint_path)
            if self.getVerbose():
                print(f"run {run_id} goes on from its checkpoint at {plan.checkpoint_path}")
        function, args = self._trainer(plan, checkpoint)
        values = backend.run(function, args=args, env=self._environment())
        return self._model_of(values[0], run_id, data.columns)

    def _plan(self, data: Dataset, seed: int, run_id: str) -> Plan:
        store: FilesystemStore = self.getStore()
        folder = store.get_checkpoint_path(run_id)
        edited = [tuple(one) for one in self.getTransformationEditFields() or ()]
        return Plan(
            data=data,
            store=store,
            run_id=run_id,
            checkpoint_path=f"{folder}/{store.get_checkpoint_filename()}" if folder else None,
            features=self.getFeatureCols(),
            labels=self.getLabelCols(),
            weight=self.getSampleWeightCol(),
            batch_size=self.getBatchSize(),
            val_batch_size=self.getValBatchSize() or self.getBatchSize(),
            epochs=self.getEpochs(),
            steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(),
            seed=seed,
            is_seeded=self.getRandomSeed() is not None,
            shuffle=self.getShuffle() and self.getShufflingBufferSize() != 0,
            cache=self.getInMemoryCacheAll(),
            transformation=Transformation(
                self.getTransformationFn(), edited, tuple(self.getTransformationRemovedFields() or ())
            ),
            label_shapes=self.getLabelShapes(),
            use_gpu=self.getUseGpu(),
            verbose=self.getVerbose(),
        )


class HorovodModel(Model, ModelParams):
    """transform() adds a column with predictions for each label column: `<label>__output`, or those of setOutputCols().

    An output of several values is a vector; one of a single value has the type of its label column.
    """

    def _predictor(self, columns: dict[str, Column]) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """What maps batches of feature columns (pandas DataFrames) to batches of outputs: DataFrames with a column of
        lists for each output. It travels to the executors."""
        raise NotImplementedError

    def _transform(self, dataset: Any) -> Any:
        from pyspark.ml.functions import array_to_vector, vector_to_array
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.functions import col, pandas_udf, struct

        features, labels, outputs = self.getFeatureColumns(), self.getLabelColumns(), self.getOutputCols()
        missing = [name for name in features if name not in dataset.columns]
        if missing:
            raise ValueError(f"feature_columns: {missing} are not among the columns {dataset.columns}")
        columns = {name: Column(*value) for name, value in self.getOrDefault("_metadata").items()}
        inputs = [
            vector_to_array(col(f"`{name}`"))
            if isinstance(dataset.schema[name].dataType, VectorUDT)
            else col(f"`{name}`")
            for name in features
        ]
        kind = ", ".join(f"`{index}` array<double>" for index in range(len(outputs)))
        predict = pandas_udf(self._predictor(columns), kind)
        whole = struct(*[one.alias(str(index)) for index, one in enumerate(inputs)])
        result = dataset.withColumn("__predicted", predict(whole))
        lengths = self._output_sizes()
        for index, (name, label) in enumerate(zip(outputs, labels, strict=True)):
            values, column = col(f"__predicted.`{index}`"), columns[label]
            if column.kind == SCALAR and lengths[index] == 1:
                one = values[0]
                value = one if column.type in ("float", "double") else _rounded(one)
                result = result.withColumn(name, value.cast(column.type))
            elif column.kind in (SCALAR, VECTOR):
                result = result.withColumn(name, array_to_vector(values))
            else:
                result = result.withColumn(name, values.cast(f"array<{column.type}>"))
        return result.drop("__predicted")

    def _output_sizes(self) -> Sequence[int]:
        """Values in a row of each output."""
        raise NotImplementedError


def _rounded(value: Any) -> Any:
    from pyspark.sql.functions import round as rounded

    return rounded(value)


def own_threads() -> int:
    """Threads that a framework may use in a task of Spark, which has set OMP_NUM_THREADS to the task's cores."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1
