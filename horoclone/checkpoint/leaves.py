"""Converts arrays of every framework to bytes and back. NumPy's are built in; those of torch and JAX have packages
below this one, which are loaded once the framework's binding is imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple, Protocol

import numpy as np

from horoclone.checkpoint.failures import CheckpointError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# The names that the format has for dtypes, and NumPy's. Those without a NumPy dtype need the package ml_dtypes.
_NUMPY_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_FORMAT_NAMES = {ours: theirs for theirs, ours in _NUMPY_NAMES.items()}
_OF_ML_DTYPES = ("BF16", "F8_E4M3", "F8_E5M2")
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4,
    "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class Form(NamedTuple):
    """dtype: the format's name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """What its elements take."""
        return ITEM_BYTES[self.dtype] * int(np.prod(self.shape, dtype=np.int64))


class Kind(Protocol):
    """The arrays of one framework."""

    name: str

    def owns(self, value: Any) -> bool:
        """Whether it is one of them."""
        ...

    def form(self, value: Any) -> Form:
        """Its dtype and shape. TypeError for what the format cannot hold."""
        ...

    def copy(self, value: Any, into: Bytes) -> None:
        """Copies its elements there, in row-major order and little-endian. `into` is aligned for its dtype."""
        ...

    def made(self, form: Form, data: Bytes, like: Any | None) -> Any:
        """An array of these bytes, which it may keep; where `like` is, when it is given."""
        ...


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of the format."""
    if name not in _OF_ML_DTYPES:
        return np.dtype(_NUMPY_NAMES[name]).newbyteorder("<")
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(
            f"the save has arrays of {_NUMPY_NAMES[name]}, which NumPy alone does not know: `pip install ml_dtypes`, "
            "or import the framework's binding (horoclone.torch, horoclone.jax) before load()."
        ) from None
    return np.dtype(getattr(ml_dtypes, _NUMPY_NAMES[name]))


def format_name(dtype: str) -> str:
    """The format's name for a dtype that NumPy calls so. TypeError where it has none."""
    if dtype not in _FORMAT_NAMES:
        raise TypeError(f"arrays of {dtype} cannot be saved; convert it (a complex128 to two float64)")
    return _FORMAT_NAMES[dtype]


class _NumPy:
    name = "numpy"

    def owns(self, value: Any) -> bool:
        return isinstance(value, (np.ndarray, np.generic))

    def form(self, value: Any) -> Form:
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            raise TypeError(_subclass(value))
        return Form(format_name(value.dtype.name), tuple(value.shape))

    def copy(self, value: Any, into: Bytes) -> None:
        dtype = value.dtype.newbyteorder("<") if value.dtype.byteorder == ">" else value.dtype
        into.view(dtype).reshape(value.shape)[...] = value

    def made(self, form: Form, data: Bytes, like: Any | None) -> Any:
        return data.view(numpy_dtype(form.dtype)).reshape(form.shape)


def _subclass(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    how = "its data and its mask" if isinstance(value, np.ma.MaskedArray) else "numpy.asarray(value)"
    return f"an array of the class {kind} would come back as a plain one; pass {how}"


class _BigEndian(_NumPy):
    """Arrays of the byte order that the format does not have."""

    name = "numpy big-endian"

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.ndarray) and value.dtype.byteorder == ">" and value.dtype.itemsize > 1

    def made(self, form: Form, data: Bytes, like: Any | None) -> Any:
        array = super().made(form, data, like)
        return array.astype(array.dtype.newbyteorder(">"))


class _Scalar(_NumPy):
    """np.float32(1) and its kin, which are no arrays."""

    name = "numpy scalar"

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.generic)

    def made(self, form: Form, data: Bytes, like: Any | None) -> Any:
        return super().made(form, data, like)[()]


NUMPY: Kind = _NumPy()
_kinds: list[Kind] = [_Scalar(), _BigEndian(), NUMPY]
_not_loaded = ["torch", "jax"]  # whose arrays are known once horoclone's binding is imported


def register(kind: Kind) -> None:
    """Arrays of another framework can be saved from now on, and come back as such."""
    _kinds.insert(0, kind)


def _load_kinds() -> None:
    for framework in [one for one in _not_loaded if f"horoclone.{one}" in sys.modules]:
        importlib.import_module(f"horoclone.checkpoint.{framework}")
        if framework in _not_loaded:  # another thread may have been as fast
            _not_loaded.remove(framework)


def kind_of(value: Any) -> Kind | None:
    """The framework's, None where it is no array of one that is imported."""
    _load_kinds()
    return next((kind for kind in _kinds if kind.owns(value)), None)


def kind_named(name: str) -> Kind:
    """NumPy's where the framework's binding is not imported."""
    _load_kinds()
    return next((kind for kind in _kinds if kind.name == name), NUMPY)
