"""`import horovod.torch` gives the module horoclone.torch: the finder behind horovod.py, the file beside the package.

`horovod` itself is a module of its own that hands on what horoclone has: its version is the one of Horovod whose
behaviour this is, which scripts and libraries compare.

Nothing happens before `horovod` is imported, which executes horovod.py, which calls stand_for_horovod(). A real Horovod
anywhere on the path, or HOROCLONE_NO_HOROVOD_ALIAS=1, takes precedence.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import horoclone
from horoclone.stand_ins import StandInModule, use_horovods_names

_OFF = "HOROCLONE_NO_HOROVOD_ALIAS"

_TORCH = "Train with PyTorch (import horoclone.torch as hvd)"
_SPARK_LIGHTNING = (
    "There is no estimator for Lightning modules. Train in horoclone.spark.run(function), with Lightning's "
    'Trainer(strategy="horoclone") in it (import horoclone.lightning), or use TorchEstimator for a torch model.'
)
_SPARK_DATA = (
    "tf.data service on Spark is not supported. Ranks read their rows themselves: estimators do, and in "
    "horoclone.spark.run() tf.data's shard() or pyarrow does."
)
_MXNET = f"MXNet is retired and not supported. {_TORCH}."
_STARTED = "Start jobs with horovod.run(), horovodrun, horovod.runner.launch, horovod.ray or horovod.spark"
_BY_VARIABLES = (
    f"{_STARTED}. A scheduler that starts the processes itself gives them the variables of torchrun (RANK, WORLD_SIZE, "
    "MASTER_ADDR, MASTER_PORT), and hvd.init() needs no rendezvous server"
)
_SUBPROCESS = "Use the standard library's subprocess and threading"

# Horovod's modules that have no counterpart here: what to do instead, and the submodules that may be imported.
_ABSENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "spark.lightning": (_SPARK_LIGHTNING, ("estimator", "datamodule")),
    "spark.tensorflow": (_SPARK_DATA, ("compute_worker",)),
}  # fmt: skip

# Modules whose import fails: parts of Horovod's launcher that only Horovod itself uses, and MXNet. `except ImportError`
# takes another way, as where Horovod was built without a framework.
_REFUSED: dict[str, str] = {
    "mxnet": _MXNET,
    "runner.common.service": f"{_STARTED}; for tf.data's service, horovod.tensorflow.data.compute_worker",
    "runner.common.util.address": _SUBPROCESS,
    "runner.common.util.network": _STARTED,
    "runner.common.util.safe_shell_exec": _SUBPROCESS,
    "runner.common.util.tiny_shell_exec": _SUBPROCESS,
    "runner.driver": _STARTED,
    "runner.elastic.constants": "Failures of a job are RuntimeErrors, whose text says why",
    "runner.elastic.driver": f"{_STARTED}; docs/elastic.md says how elastic jobs find their hosts",
    "runner.elastic.registration": _STARTED,
    "runner.elastic.rendezvous": _BY_VARIABLES,
    "runner.elastic.worker": "A state hears of changes by itself: horovod.common.elastic has notification_manager",
    "runner.gloo_run": _BY_VARIABLES,
    "runner.http": _BY_VARIABLES,
    "runner.js_run": "Under LSF, start jobs with mpirun or horovodrun -H",
    "runner.mpi_run": "Start jobs with mpirun, or horovod.run(..., use_mpi=True)",
    "runner.run_task": _STARTED,
    "runner.task": _STARTED,
    "runner.task_fn": _STARTED,
    "runner.util": _SUBPROCESS,
}


class _Horovod(ModuleType):
    """`horovod`: the names of horoclone."""

    __version__ = horoclone.HOROVOD_VERSION

    def __init__(self) -> None:
        super().__init__("horovod", horoclone.__doc__)
        self.__path__ = list(horoclone.__path__)
        self.__file__ = horoclone.__file__
        self.__all__ = list(vars(horoclone)["__all__"])

    def __getattr__(self, name: str) -> Any:
        return getattr(horoclone, name)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *dir(horoclone)})


class _TheAlias:
    """Loads `horovod`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Horovod()

    def exec_module(self, module: ModuleType) -> None:
        use_horovods_names()


class _SameModule:
    """Loads `horovod.x` by importing the module of horoclone: no second copy, and its own spec stays as it is."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # A module may put another in its place in sys.modules; the import system then hands out that one.
        sys.modules[module.__name__] = importlib.import_module(self.real)

    def get_code(self, name: str) -> Any:
        """For `python -m horovod.runner.launch`: runpy asks the loader."""
        spec = importlib.util.find_spec(self.real)
        loader: Any = spec.loader if spec is not None else None
        return loader.get_code(self.real) if loader is not None else None


class _Refusal:
    """Fails with what to do instead."""

    def __init__(self, instead: str) -> None:
        self.instead = instead

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.replace("horoclone", "horovod", 1)
        raise ImportError(f"{name} is not in horoclone. {self.instead.rstrip('.')}.", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn:
    """Loads a module of Horovod that horoclone has not."""

    def __init__(self, instead: str) -> None:
        self.instead = instead

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name, self.instead)

    def exec_module(self, module: ModuleType) -> None:
        pass


def find_spec(
    name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """The finder's method: a spec for `horovod` and for what is below it, None for every other name.

    None also below a `horovod` that is not ours, and when this alias steps aside.
    """
    top, _, rest = name.partition(".")
    # `from horovod.runner import x` looks below the module's own name
    if top == "horoclone" and rest in _REFUSED:
        return _spec(name, _Refusal(_REFUSED[rest]), True)
    if top != "horovod":
        return None
    if not rest:
        if _switched_off() or _real_horovod() is not None:
            return None
        return _spec(name, _TheAlias(), True)
    if not isinstance(sys.modules.get("horovod"), _Horovod):
        return None
    if not isinstance(sys.modules.get(name.rpartition(".")[0]), StandInModule):
        real = importlib.util.find_spec(f"horoclone.{rest}")
        if real is not None:
            return _spec(name, _SameModule(f"horoclone.{rest}"), real.submodule_search_locations is not None)
    if rest in _REFUSED:
        return _spec(name, _Refusal(_REFUSED[rest]), True)
    for module, (instead, submodules) in _ABSENT.items():
        if rest == module or rest.removeprefix(f"{module}.") in submodules:
            return _spec(name, _StandIn(instead), True)
    return None


def _spec(name: str, loader: Any, is_package: bool) -> ModuleSpec:
    return ModuleSpec(name, loader, origin="horoclone", is_package=is_package)


def _switched_off() -> bool:
    return os.environ.get(_OFF, "0") not in ("", "0")


def _real_horovod() -> ModuleSpec | None:
    """What anybody else would find as `horovod`. A bare folder of that name (a clone's) does not count."""
    for finder in list(sys.meta_path):
        if getattr(finder, "__name__", "") == "HorovodAlias" or finder is sys.modules[__name__]:
            continue
        search = getattr(finder, "find_spec", None)
        if search is None:
            continue
        # Entry by entry, because a horovod.py of ours may hide a Horovod that comes later.
        for place in [[entry] for entry in sys.path] if finder is PathFinder else [None]:
            spec = search("horovod", place)
            if (
                spec is not None
                and spec.loader is not None
                and spec.origin is not None
                and not _is_ours(spec)
            ):
                return spec  # type: ignore[no-any-return]
    return None


def _is_ours(spec: ModuleSpec) -> bool:
    if os.path.basename(spec.origin or "") != "horovod.py":
        return False
    try:
        with open(str(spec.origin), "rb") as file:
            return b"horovod_alias.stand_for_horovod()" in file.read(4096)
    except OSError:
        return False


def stand_for_horovod() -> None:
    """Called by horovod.py while it is imported: what is then found under that name is horoclone, or the real Horovod.

    ModuleNotFoundError when there is no real one and HOROCLONE_NO_HOROVOD_ALIAS is set.
    """
    real = _real_horovod()
    if real is not None:
        module = importlib.util.module_from_spec(real)
        sys.modules["horovod"] = module
        assert real.loader is not None
        real.loader.exec_module(module)
        return
    if _switched_off():
        raise ModuleNotFoundError(f"No module named 'horovod' ({_OFF} is set)", name="horovod")
    spec = _spec("horovod", _TheAlias(), True)
    module = importlib.util.module_from_spec(spec)
    sys.modules["horovod"] = module
    _TheAlias().exec_module(module)
    install()


def install() -> None:
    """Puts the alias in front of all finders, where horovod.py is not on the path. Once is enough."""
    already = any(getattr(finder, "__name__", "") in ("HorovodAlias", __name__) for finder in sys.meta_path)
    if not already:
        sys.meta_path.insert(0, sys.modules[__name__])  # type: ignore[arg-type]
