"""Under Horovod's name: the parameters of estimators and models, each with its setX() and getX().

The table says what each means; the methods are made from it. ImportError with the command that installs PySpark, where
it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

try:
    from pyspark import keyword_only
    from pyspark.ml.param.shared import HasOutputCols, Param, Params, TypeConverters
except ImportError as error:
    raise ImportError(
        f"the estimators need PySpark ({error}): pip install pyspark pyarrow pandas fsspec", name="pyspark"
    ) from error

from horoclone.spark.data.preparing import check_validation

# Of petastorm, which read Horovod's data: they say nothing to who reads it here.
PETASTORMS = (
    "train_reader_num_workers", "val_reader_num_workers", "reader_pool_type", "partitions_per_process",
    "shuffle_buffer_size", "mp_start_method"
)  # fmt: skip
_ANY = TypeConverters.identity
_INT, _BOOL, _TEXT = TypeConverters.toInt, TypeConverters.toBoolean, TypeConverters.toString
_TEXTS, _FLOATS = TypeConverters.toListString, TypeConverters.toListFloat
_NONE = "unused here: petastorm read Horovod's data, pyarrow reads ours"


class Row(NamedTuple):
    """accessor: as in setX and getX; empty: there are none."""

    name: str
    accessor: str
    doc: str
    default: Any = None
    convert: Callable[[Any], Any] = _ANY


ESTIMATOR_TABLE = (
    Row("num_proc", "NumProc", "number of ranks; default: spark.default.parallelism"),
    Row("backend", "Backend", "what runs the ranks instead of a SparkBackend; goes without num_proc"),
    Row("store", "Store", "a Store for training data, checkpoints and logs"),
    Row("model", "Model", "the model to train"),
    Row("optimizer", "Optimizer", "the optimizer, whose learning rate is multiplied by the number of ranks"),
    Row("loss", "Loss", "the loss, or a list with one for each label column"),
    Row("loss_weights", "LossWeights", "a weight for each loss; default: alike", None, _FLOATS),
    Row("metrics", "Metrics", "metrics to record in each epoch", []),
    Row("gradient_compression", "GradientCompression", "the form of gradients on the wire: hvd.Compression.*"),
    Row("backward_passes_per_step", "BackwardPassesPerStep", "batches added up for one step", 1, _INT),
    Row("feature_cols", "FeatureCols", "columns that the model takes, in the order of its inputs", None, _TEXTS),
    Row("label_cols", "LabelCols", "columns with labels, one for each output of the model", None, _TEXTS),
    Row("continuous_cols", "ContinuousCols", "of NVTabular's data module, which is not here", None, _TEXTS),
    Row("categorical_cols", "CategoricalCols", "of NVTabular's data module, which is not here", None, _TEXTS),
    Row("data_module", "DataModule", "another way to read data; only None is possible here"),
    Row("label_shapes", "LabelShapes", "shapes of the labels, -1 for the batch"),
    Row("sample_weight_col", "SampleWeightCol", "column with the weight of each row", None, _TEXT),
    Row("validation", "Validation", "part of the rows for validation (0 to 1), or a column that is true for them"),
    Row("callbacks", "Callbacks", "callbacks of Keras", []),
    Row("batch_size", "BatchSize", "rows of a batch on one rank", 32, _INT),
    Row("val_batch_size", "ValBatchSize", "the same in validation; default: batch_size", None, _INT),
    Row("epochs", "Epochs", "epochs to train", 1, _INT),
    Row("train_steps_per_epoch", "TrainStepsPerEpoch", "batches of an epoch; default: all rows once", None, _INT),
    Row("validation_steps_per_epoch", "ValidationStepsPerEpoch", "the same in validation", None, _INT),
    Row("shuffle", "Shuffle", "whether training rows are shuffled in each epoch", True, _BOOL),
    Row("random_seed", "RandomSeed", "of the shuffle, the split and the framework; default: a new one", None, _INT),
    Row("verbose", "Verbose", "0: silent, 1: metrics of epochs, more: as the framework has it", 1, _INT),
    Row("run_id", "RunId", "name of the run in the store; one that exists goes on from its checkpoint", None, _TEXT),
    Row("transformation_fn", "TransformationFn", "row (a dict) in, row out, before training and validation"),
    Row("transformation_edit_fields", "TransformationEditFields", "(name, dtype, shape, nullable) of what it changes"),
    Row("transformation_removed_fields", "TransformationRemovedFields", "names of what it drops"),
    Row("inmemory_cache_all", "InMemoryCacheAll", "keep each rank's rows in memory", False, _BOOL),
    Row("compress_sparse_cols", "CompressSparseCols", "store the data in fewer bytes, for more time", False, _BOOL),
    Row("use_gpu", "UseGpu", "train on a GPU where there is one", True, _BOOL),
    Row("mp_start_method", "MpStartMethod", _NONE, None, _TEXT),
    Row("train_reader_num_workers", "TrainReaderNumWorker", _NONE, 2),
    Row("val_reader_num_workers", "ValReaderNumWorker", _NONE, 2),
    Row("reader_pool_type", "ReaderPoolType", _NONE, "thread"),
    Row("partitions_per_process", "PartitionsPerProcess", _NONE, 10, _INT),
    Row("shuffle_buffer_size", "ShufflingBufferSize", _NONE, None, _INT),
)  # fmt: skip

MODEL_TABLE = (
    Row("history", "History", "what was recorded in each epoch"),
    Row("model", "Model", "the trained model"),
    Row("feature_columns", "FeatureColumns", "columns that the model takes"),
    Row("label_columns", "LabelColumns", "columns whose values it predicts"),
    Row("run_id", "RunId", "of the run that trained it", None, _TEXT),
    Row("_metadata", "", "what is known of the columns; of no use to others"),
)


def accessors(table: tuple[Row, ...]) -> Callable[[type], type]:
    """Gives a class the parameters of the table, with their methods. Those that it defines itself stay."""

    def add(cls: type) -> type:
        for row in table:
            setattr(cls, row.name, Param(Params._dummy(), row.name, row.doc, typeConverter=row.convert))
            for verb, method in (("set", _setter(row.name)), ("get", _getter(row.name))):
                if row.accessor and f"{verb}{row.accessor}" not in vars(cls):
                    setattr(cls, f"{verb}{row.accessor}", method)
        return cls

    return add


def _setter(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, value: self._set(**{name: value})


def _getter(name: str) -> Callable[[Any], Any]:
    return lambda self: self.getOrDefault(name)


def defaults(table: tuple[Row, ...]) -> dict[str, Any]:
    return {row.name: row.default for row in table}


@accessors(ESTIMATOR_TABLE)
class EstimatorParams(Params):
    """Of every estimator; ESTIMATOR_TABLE has them."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**defaults(ESTIMATOR_TABLE))

    def _check_params(self) -> None:
        """ValueError that names the parameter that is missing or wrong."""
        for name, what in (
            ("model", "the model to train"),
            ("store", "a Store, such as Store.create(path), for training data and checkpoints"),
            ("feature_cols", "the columns that the model takes"),
            ("label_cols", "the columns with labels"),
        ):
            value = self.getOrDefault(name)
            if value is None or (isinstance(value, list) and not value):
                raise ValueError(f"{type(self).__name__}: {name} is missing: it gives {what}")
        check_validation(self.getOrDefault("validation"))
        for name in (
            "batch_size", "epochs", "val_batch_size", "train_steps_per_epoch", "validation_steps_per_epoch",
            "backward_passes_per_step",
        ):  # fmt: skip
            value = self.getOrDefault(name)
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}: {name} must be at least 1, not {value}")

    @keyword_only  # type: ignore[untyped-decorator]
    def setParams(self, **kwargs: Any) -> Any:
        """Several at a time, by their names."""
        return self._set(**kwargs)


@accessors(MODEL_TABLE)
class ModelParams(HasOutputCols):
    """Of every model; MODEL_TABLE has them."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**defaults(MODEL_TABLE))

    def setLabelColoumns(self, value: Any) -> Any:
        """Horovod's spelling."""
        return self._set(label_columns=value)

    def setOutputCols(self, value: list[str]) -> Any:
        """Names of the columns that transform() adds, one for each label column."""
        return self._set(outputCols=value)

    @keyword_only  # type: ignore[untyped-decorator]
    def setParams(self, **kwargs: Any) -> Any:
        """Several at a time, by their names."""
        return self._set(**kwargs)
