"""Under Horovod's name: estimators and models on disk, as stages of Spark's pipelines are.

Their parameters are code and objects (a model, a loss, functions), so they are pickled, and loading one runs code: load
what you trust.
"""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

_KEY = "horocloneParams"
_NOT_SAVED = ("backend", "store")  # of one application


class HorovodParamsWriter(MLWriter):
    """write().overwrite().save(path)."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        values = {
            param.name: value
            for param, value in self.instance._paramMap.items()
            if param.name not in _NOT_SAVED and value is not None
        }
        packed = {
            name: base64.b64encode(self.instance._pack(name, value)).decode()
            for name, value in values.items()
        }
        DefaultParamsWriter.saveMetadata(
            self.instance, path, self.sparkSession, extraMetadata={_KEY: packed}, paramMap={}
        )


class HorovodParamsReader(MLReader):
    """read().load(path)."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        if _KEY not in metadata:
            raise ValueError(
                f"{path} holds {metadata['class']}, which {self.cls.__name__}.save() has not written"
            )
        instance = self.cls()
        packed = {name: base64.b64decode(text) for name, text in metadata[_KEY].items()}
        instance._set(**self.cls._unpacked(packed))  # type: ignore[attr-defined]
        instance._resetUid(metadata["uid"])
        return instance


class Persistent(MLWritable, MLReadable):
    """save(path), write() and load(path). A derived class may pack values in another way than as a pickle."""

    def write(self) -> HorovodParamsWriter:
        return HorovodParamsWriter(self)

    @classmethod
    def read(cls) -> HorovodParamsReader:
        return HorovodParamsReader(cls)

    @staticmethod
    def _pack(name: str, value: Any) -> bytes:
        return bytes(cloudpickle.dumps(value))

    @classmethod
    def _unpacked(cls, packed: dict[str, bytes]) -> dict[str, Any]:
        return {name: cloudpickle.loads(content) for name, content in packed.items()}
