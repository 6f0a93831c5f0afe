"""Under Horovod's name: where estimators keep training data, checkpoints and logs. Any file system that fsspec knows.

All nodes, and Spark, must reach it under the same URL: a shared folder, or an object store. A folder of one machine is
enough where everything runs there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from horoclone.errors import Unsupported

_HDFS = (
    "There is no store for HDFS here. Use an object store or a shared folder that all nodes reach (an NFS gateway or a "
    "FUSE mount of HDFS is one): Store.create('/mnt/...'). FilesystemStore('hdfs://...') goes through fsspec and "
    "pyarrow's libhdfs; it has not been tried."
)
_DBFS = (
    "There is no store for DBFS here. Databricks mounts it on every node: Store.create('/dbfs/...') uses that folder, "
    "or give the URL of the object store behind it."
)


class Store:
    """Base class of what an estimator needs of a store; FilesystemStore has it all. Paths are URLs, or absolute
    paths."""

    def get_train_data_path(self, idx: Any = None) -> str:
        """Returns the path of the training data as Parquet: that of fit_on_parquet(), or of one fit() where idx is
        given."""
        raise NotImplementedError

    def get_val_data_path(self, idx: Any = None) -> str:
        """Returns the path of the validation data, as get_train_data_path() does."""
        raise NotImplementedError

    def get_test_data_path(self, idx: Any = None) -> str:
        """Returns the path of test data, which nothing here writes."""
        raise NotImplementedError

    def saving_runs(self) -> bool:
        """Returns whether checkpoints and logs are kept."""
        raise NotImplementedError

    def get_runs_path(self) -> str:
        """Returns the path of all runs."""
        raise NotImplementedError

    def get_run_path(self, run_id: str) -> str:
        """Returns the path of one run, in which its checkpoint and its logs are."""
        raise NotImplementedError

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Returns the folder of the run's checkpoint; None where runs are not kept."""
        raise NotImplementedError

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Returns the files of the checkpoint folder whose names end so."""
        raise NotImplementedError

    def get_logs_path(self, run_id: str) -> str | None:
        """Returns the path of the run's logs; None where runs are not kept."""
        raise NotImplementedError

    def get_checkpoint_filename(self) -> str:
        """Returns the name of the checkpoint's file in the folder of a run."""
        raise NotImplementedError

    def get_logs_subdir(self) -> str:
        """Returns the name of the folder of logs in the folder of a run."""
        raise NotImplementedError

    def exists(self, path: str) -> bool:
        """Returns whether there is a file or folder of this path."""
        raise NotImplementedError

    def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        raise NotImplementedError

    def write_text(self, path: str, text: str) -> None:
        """Writes a text as a file, in the place of one that is there."""
        raise NotImplementedError

    def is_parquet_dataset(self, path: str) -> bool:
        """Returns whether Parquet can be read there."""
        raise NotImplementedError

    def get_parquet_dataset(self, path: str) -> Any:
        """Returns a pyarrow.dataset.Dataset of the Parquet files there."""
        raise NotImplementedError

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """Returns a context manager that gives a local folder for the files of the run."""
        raise NotImplementedError

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies what is in a local folder to the folder of the run."""
        raise NotImplementedError

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Returns the store for this URL or path. Unsupported for hdfs:// and dbfs:/, with what to do instead."""
        if prefix_path.startswith("hdfs://"):
            return HDFSStore(prefix_path)
        if prefix_path.startswith("dbfs:"):
            return DBFSLocalStore(prefix_path)
        return FilesystemStore(prefix_path, *args, **kwargs)


class FilesystemStore(Store):
    """Below prefix_path, a URL that fsspec knows (s3://, gs://, file:// ...) or a path.

    train_path, val_path, test_path, runs_path: other places than those below the prefix. save_runs False keeps no
    checkpoints and logs. storage_options: for fsspec, on every node.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self.prefix_path = self.get_full_path(prefix_path)
        self._train = self._place(train_path, "intermediate_train_data")
        self._val = self._place(val_path, "intermediate_val_data")
        self._test = self._place(test_path, "intermediate_test_data")
        self._runs = self._place(runs_path, "runs")
        self._save_runs = save_runs
        self.checkpoint_filename = checkpoint_filename or "checkpoint"

    def _place(self, path: str | None, name: str) -> str:
        return self.get_full_path(path) if path is not None else self.prefix_path.rstrip("/") + "/" + name

    @classmethod
    def matches(cls, path: str) -> bool:
        return True

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        return self.get_filesystem()

    def get_filesystem(self) -> Any:
        return _fsspec().core.url_to_fs(self.prefix_path, **self.storage_options)[0]

    def get_full_path(self, path: str) -> str:
        """A URL: a path becomes file://..."""
        return path if "://" in path else pathlib.Path(os.path.abspath(path)).as_uri()

    def get_localized_path(self, path: str) -> str:
        """As its file system has it, without the protocol."""
        return str(_fsspec().core.url_to_fs(path, **self.storage_options)[1])

    def get_train_data_path(self, idx: Any = None) -> str:
        return self._train if idx is None else f"{self._train}.{idx}"

    def get_val_data_path(self, idx: Any = None) -> str:
        return self._val if idx is None else f"{self._val}.{idx}"

    def get_test_data_path(self, idx: Any = None) -> str:
        return self._test if idx is None else f"{self._test}.{idx}"

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs

    def get_run_path(self, run_id: str) -> str:
        return f"{self._runs}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        folder = self.get_checkpoint_path(run_id)
        if folder is None or not self.exists(folder):
            return []
        return sorted(
            name
            for name in self.fs.ls(self.get_localized_path(folder), detail=False)
            if name.endswith(suffix)
        )

    def get_logs_path(self, run_id: str) -> str | None:
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        return self.checkpoint_filename

    def get_logs_subdir(self) -> str:
        return "logs"

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        with self.fs.open(self.get_localized_path(path), "rb") as file:
            return bytes(file.read())

    def write_text(self, path: str, text: str) -> None:
        with self.fs.open(self.get_localized_path(path), "w") as file:
            file.write(text)

    def write(self, path: str, content: bytes) -> None:
        """The file is whole or not there, where the file system can rename."""
        place, fs = self.get_localized_path(path), self.fs
        fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        with fs.open(f"{place}.part", "wb") as file:
            file.write(content)
        fs.mv(f"{place}.part", place)

    def remove(self, path: str) -> None:
        """A folder with all that is in it, where it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.get_localized_path(path), recursive=True)

    def is_parquet_dataset(self, path: str) -> bool:
        try:
            return bool(self.get_parquet_dataset(path).schema.names)
        except (OSError, ValueError):
            return False

    def get_parquet_dataset(self, path: str) -> Any:
        import pyarrow.dataset

        return pyarrow.dataset.dataset(self.get_localized_path(path), filesystem=self.fs, format="parquet")

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        @contextlib.contextmanager
        def folder() -> Iterator[str]:
            with tempfile.TemporaryDirectory() as path:
                yield path

        return folder

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        def copy(folder: str) -> None:
            target = self.get_localized_path(self.get_run_path(run_id))
            for here, _, files in os.walk(folder):
                below = os.path.relpath(here, folder)
                there = target if below == "." else f"{target}/{below}"
                self.fs.makedirs(there, exist_ok=True)
                for name in files:
                    self.fs.put_file(os.path.join(here, name), f"{there}/{name}")

        return copy


class LocalStore(FilesystemStore):
    """The same; Horovod's older name for stores in local folders."""


class HDFSStore(Store):
    """Unsupported, with what to do instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(f"HDFSStore: {_HDFS}")


class DBFSLocalStore(Store):
    """Unsupported, with what to do instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(f"DBFSLocalStore: {_DBFS}")


def _refuse(text: str) -> NoReturn:
    raise Unsupported(text)


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise Unsupported(f"a Store needs fsspec ({error}): pip install fsspec") from None
    return fsspec
