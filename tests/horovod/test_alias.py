"""`import horovod...`: the same modules as horoclone's, stand-ins for what is missing, and when it steps aside.

Programs run in interpreters of their own, with a site folder that holds horovod.py as an installation does.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from world import ran

import horoclone

ROOT = Path(__file__).resolve().parents[2]
STAND = ROOT / "horovod.py"


@pytest.fixture
def site_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / STAND.name).write_bytes(STAND.read_bytes())
    return folder


def run_python(site_folder: Path, program: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a bare interpreter (-S: no installed .pth) with the site folder and a tree without horovod.py.

    What is installed beside pytest stays importable, behind everything else.
    """
    packages = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    home = site_folder.parent / "home"
    if not home.exists():
        home.mkdir()
        (home / "horoclone").symlink_to(ROOT / "horoclone")
    start = f"import sys; sys.path += {[str(site_folder), str(home), *packages]!r}\n"
    environ = {name: value for name, value in os.environ.items() if name != "HOROCLONE_NO_HOROVOD_ALIAS"}
    return ran(sys.executable, "-S", *flags, "-c", start + program, cwd=site_folder.parent, env={**environ, **env})  # fmt: skip


def output_of(site_folder: Path, program: str, **env: str) -> str:
    done = run_python(site_folder, program, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_runs_before_the_name_is_imported(site_folder: Path) -> None:
    """No .pth file, no finder: what is there is one file, which the first import of horovod executes."""
    assert not list(ROOT.glob("*.pth")) and not list((ROOT / "horoclone").glob("*.pth"))
    program = """
before = list(sys.meta_path)
import horoclone.errors
assert sys.meta_path == before and "horovod" not in sys.modules
import horovod.common
print(sys.meta_path[0].__name__, sys.meta_path[1:] == before)
"""
    assert output_of(site_folder, program).split() == ["horoclone.horovod_alias", "True"]


def test_it_is_found_on_the_path_of_a_bare_interpreter(site_folder: Path) -> None:
    """PYTHONPATH=folder of `pip install --target`: no .pth file is read there."""
    (site_folder / "horoclone").symlink_to(ROOT / "horoclone")
    for program in (
        "import horovod.common.util",
        "from horovod.runner.common.util import hosts",
        "from horovod import run",
        "import importlib.util as u; assert u.find_spec('horovod.common') and not u.find_spec('horovod.none')",
    ):
        program += "; import sys; print(sys.modules['horovod'].__name__, sys.modules['horovod'].__version__)"
        done = ran(sys.executable, "-S", "-c", program, cwd=site_folder.parent, env={"PYTHONPATH": str(site_folder)})  # fmt: skip
        assert done.stdout == "horovod 0.28.1\n", done.stderr
    words = [sys.executable, "-S", "-m", "horovod.runner.launch", "--version"]
    done = ran(*words, env={"PYTHONPATH": str(site_folder)}, cwd=site_folder.parent)  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == horoclone.HOROVOD_VERSION, done.stderr


def test_the_packages_are_horoclones_without_a_framework(site_folder: Path) -> None:
    program = """
import horovod, horovod.common, horovod.common.util, horovod.common.exceptions, horovod.common.process_sets
import horovod.common.basics, horovod.runner
import horoclone, horoclone.errors, horoclone.process_sets, horoclone.launch.api
assert horovod.__name__ == horovod.__spec__.name == "horovod" and horovod.ProcessSet is horoclone.ProcessSet
assert horovod.__version__ == horoclone.HOROVOD_VERSION != horoclone.__version__
assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28, 1), "what distributed-embeddings and SynapseML ask for"
for name in ("common", "common.util", "common.exceptions", "common.process_sets", "common.basics", "runner"):
    assert sys.modules["horovod." + name] is sys.modules["horoclone." + name], name
    assert sys.modules["horovod." + name].__spec__.name == "horoclone." + name
assert horovod.run is horovod.runner.run is horoclone.launch.api.run and callable(horovod.run)
assert horovod.common.exceptions.HorovodInternalError is horoclone.errors.HorovodInternalError
assert horovod.common.process_sets.global_process_set is horoclone.process_sets.global_process_set
from horovod import run
from horovod.common.util import env
print("torch" in sys.modules, "numpy" in sys.modules)
import horovod.common.elastic
print("torch" in sys.modules)
from horovod import *
assert __version__ == horovod.__version__ and set(horoclone.__all__) <= set(dir(horovod)) and allreduce
"""
    assert output_of(site_folder, program).split() == ["False"] * 3


def test_the_data_loaders_are_found_under_both_names(site_folder: Path) -> None:
    program = """
import horovod.data, horoclone.data
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
assert horovod.data is horoclone.data and AsyncDataLoaderMixin is horoclone.data.AsyncDataLoaderMixin
print(sorted({"numpy", "torch", "horoclone.runtime"} & set(sys.modules)))
"""
    assert output_of(site_folder, program) == "[]\n"


# What scripts in the wild name; what is not there yet raises Unsupported on use, not on import.
OF_TORCH = [
    "horovod", "horovod.runner", "horovod.common", "horovod.common.basics", "horovod.common.util",
    "horovod.common.exceptions", "horovod.common.process_sets", "horovod.common.elastic", "horovod.data",
    "horovod.data.data_loader_base", "horovod.torch", "horovod.torch.mpi_ops", "horovod.torch.functions",
    "horovod.torch.compression", "horovod.torch.optimizer", "horovod.torch.sync_batch_norm", "horovod.torch.elastic",
    "horovod.torch.elastic.state", "horovod.torch.elastic.sampler", "horovod.spark", "horovod.spark.runner",
    "horovod.spark.conf", "horovod.spark.task", "horovod.spark.common.store", "horovod.spark.common.backend",
    "horovod.spark.lightning", "horovod.spark.lightning.estimator", "horovod.spark.tensorflow.compute_worker",
]  # fmt: skip


def test_torch_is_the_same_module_from_either_side_and_what_neither_has_says_so(site_folder: Path) -> None:
    pytest.importorskip("torch")
    program = f"""
import importlib, pickle
from horoclone.errors import Unsupported
from horovod import run  # a function, as in Horovod
for name in {OF_TORCH!r}:
    importlib.import_module(name)
import horovod, horovod.spark, horoclone.torch
import horovod.torch as hvd
from horovod.torch import functions, compression, optimizer, sync_batch_norm
from horovod.torch.elastic import TorchState, ElasticSampler, run
from horovod.torch.elastic.state import get_handler_registry
assert callable(TorchState) and callable(ElasticSampler) and callable(run(print)) and get_handler_registry()
try:
    horovod.spark.lightning.TorchEstimator()
except Unsupported as error:
    assert "orovod" in str(error), error
else:
    raise AssertionError
for line in ("import horovod.mxnet as hvd", "from horovod import mxnet", "import horovod.mxnet.mpi_ops"):
    try:
        exec(line)
    except ImportError as error:
        assert "MXNet is retired" in str(error) and "horoclone.torch" in str(error), error
    else:
        raise AssertionError(line)
for name in ("horovod.nothing", "horovod.torch.nothing", "horovod.spark.nothing", "horovodx"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert "No module named 'horovod" in str(error), error
    else:
        raise AssertionError(name)
try:
    from horovod import nothing
except ImportError:
    pass
assert not hasattr(horovod, "mxnet") and not hasattr(horovod, "nothing")

assert hvd is horoclone.torch and hvd.__name__ == "horoclone.torch" and hvd.__spec__.name == "horoclone.torch"
for name in "mpi_ops functions compression optimizer sync_batch_norm elastic elastic.state elastic.sampler".split():
    ours = importlib.import_module("horoclone.torch." + name)
    assert importlib.import_module("horovod.torch." + name) is ours, name
assert optimizer.DistributedOptimizer is hvd.DistributedOptimizer is horoclone.torch.DistributedOptimizer
from horovod.common.exceptions import HorovodInternalError
assert issubclass(hvd.Mismatch, HorovodInternalError)
assert isinstance(hvd.ProcessSet([0]), horoclone.process_sets.ProcessSet)
data = pickle.dumps((hvd.Compression.fp16, hvd.ProcessSet([0, 1]), hvd.Mismatch("x")))
assert b"horovod" not in data and b"horoclone" in data, data
assert pickle.loads(data)[0] is horoclone.torch.Compression.fp16
old = b"chorovod.torch.compression\\nFP16Compressor\\n."  # as Horovod itself has written it
assert pickle.loads(old) is horoclone.torch.Compression.fp16
hvd.init()
assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {{0: [0]}} and hvd.mpi_ops._basics.size() == 1
from horoclone import runtime
assert runtime.is_initialized()
print("same")
"""
    assert output_of(site_folder, program).split() == ["same"]


ABSENT = ("tensorflow", "tensorflow.keras", "spark.lightning")


def test_what_is_missing_can_be_imported_and_says_so_on_use(site_folder: Path) -> None:
    program = f"""
import importlib, importlib.util
from horovod.common.exceptions import HorovodInternalError
from horoclone.errors import Unsupported
for name in {ABSENT!r}:
    if importlib.util.find_spec("horoclone." + name.split(".")[0]) is not None:
        continue  # this version has it
    module = importlib.import_module("horovod." + name)
    for use in (lambda: module.init(), lambda: module.callbacks.Something(0), lambda: module.run(print)):
        try:
            use()
        except Unsupported as error:
            assert "horovod." + name in str(error) and len(str(error)) > 60, error
        else:
            raise AssertionError(name)
    assert module.HorovodInternalError is HorovodInternalError
    assert not hasattr(module, "__all__") and not hasattr(module.Thing, "__wrapped__")
    assert module.Thing is module.Thing and not isinstance(3, module.Thing)
from horovod import spark
from horovod.spark.lightning import TorchEstimator
class Mine(TorchEstimator): pass
try:
    Mine()
except Unsupported as error:
    print(str(error).split(":")[0])
"""
    assert output_of(site_folder, program).split() == ["horovod.spark.lightning.TorchEstimator"]


def test_the_switch_turns_it_off(site_folder: Path) -> None:
    off = run_python(site_folder, "import horovod.torch", HOROCLONE_NO_HOROVOD_ALIAS="1")
    assert off.returncode == 1 and "ModuleNotFoundError: No module named 'horovod'" in off.stderr
    program = "import horovod; print(horovod.__name__)"
    assert output_of(site_folder, program, HOROCLONE_NO_HOROVOD_ALIAS="0") == "horovod\n"


@pytest.mark.parametrize("kind", ["package", "module", "own finder"])
def test_it_steps_aside_for_a_real_horovod(site_folder: Path, kind: str) -> None:
    """Also when that one is an editable install, which brings a finder of its own."""
    place = site_folder if kind == "package" else site_folder.parent / "elsewhere"
    real = place / "horovod.py" if kind == "module" else place / "horovod" / "__init__.py"
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_text("print('real'); __path__ = []" if kind == "module" else "print('real')")
    if kind != "module":
        (real.parent / "torch.py").write_text("print('real torch')")
    finder = f"""
import importlib.util
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "horovod":
            return importlib.util.spec_from_file_location(name, {str(real)!r})
sys.meta_path.append(Editable)
"""
    program = (
        f"sys.path.append({str(place)!r})\n" if kind == "module" else finder if kind == "own finder" else ""
    )
    program += "import horovod\n"
    program += "try:\n    import horovod.torch\nexcept ModuleNotFoundError:\n    print('none')\n"
    program += "print('horoclone.torch' in sys.modules)"
    expected = ["real", "none" if kind == "module" else "real torch", "False"]
    assert output_of(site_folder, program).splitlines() == expected


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_real_horovod_wins_wherever_it_is_on_the_path(site_folder: Path, order: str) -> None:
    """Its folder in another place than ours: a shared PYTHONPATH before or behind the environment."""
    real = site_folder.parent / "elsewhere" / "horovod"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("kind = 'real'")
    (real / "torch.py").write_text("from horovod import kind")
    program = f"sys.path.insert({0 if order == 'before' else 'len(sys.path)'}, {str(real.parent)!r})\n"
    program += "import horovod.torch; print(horovod.torch.kind, horovod.__spec__.name, 'horoclone.torch' in sys.modules)\n"
    program += "import horovod as again; print(again is horovod, again.__path__)"
    for switch in ("0", "1"):
        lines = output_of(site_folder, program, HOROCLONE_NO_HOROVOD_ALIAS=switch).splitlines()
        assert lines == ["real horovod False", f"True {[str(real)]}"]


def test_a_real_horovod_that_cannot_be_imported_says_why_itself(site_folder: Path) -> None:
    real = site_folder.parent / "elsewhere" / "horovod"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("raise ImportError('its library is missing')")
    program = f"sys.path.append({str(real.parent)!r})\nimport horovod"
    done = run_python(site_folder, program)
    assert done.returncode == 1 and "ImportError: its library is missing" in done.stderr


def test_a_bare_folder_of_that_name_is_no_horovod(site_folder: Path) -> None:
    (site_folder / "horovod" / "examples").mkdir(parents=True)  # as beside a clone of its sources
    assert output_of(site_folder, "import horovod; print(horovod.__version__)") == "0.28.1\n"


def test_it_can_be_switched_on_without_an_installation(tmp_path: Path) -> None:
    program = """
from horoclone import horovod_alias
horovod_alias.install(); horovod_alias.install()
import horovod.common.util
print(horovod.__version__, sys.meta_path.count(horovod_alias))
"""
    assert output_of(tmp_path, program).split() == ["0.28.1", "1"]


def test_a_wrapped_optimizer_of_torch_says_by_its_class_whose_it_is(site_folder: Path) -> None:
    """Lightning 1.x, Merlin and others tell so whether they still have to wrap it; Ludwig annotates with the class."""
    pytest.importorskip("torch")
    program = """
import copy, importlib, io, pickle, torch
import horoclone.torch as hvd
hvd.init()
for package in ("horoclone", "horovod"):  # the second is imported when the first has made its optimizers
    hvd = importlib.import_module(package + ".torch")
    classes = importlib.import_module(package + ".torch.optimizer")
    plain, adasum = classes._DistributedOptimizer, classes._DistributedAdasumOptimizer
    class Mine(plain): pass
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for op, base in ((hvd.Average, plain), (hvd.Adasum, adasum)):
            p = torch.nn.Parameter(torch.ones(2))
            opt = hvd.DistributedOptimizer(kind([p], 0.1), [("p", p)], op=op)
            assert str(type(opt)) == f"<class '{package}.torch.optimizer.{kind.__name__}'>", type(opt)
            assert repr(opt).startswith(kind.__name__ + " (") and isinstance(opt, kind) and isinstance(opt, base)
            for same in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt)):
                assert str(type(same)) == str(type(opt)) and isinstance(same, kind) and isinstance(same, base), type(same)
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            file.seek(0)
            opt.load_state_dict(torch.load(file))
    if package == "horovod":
        again = [hvd.DistributedOptimizer(o) if "horovod" not in str(o.__class__) else o for o in [opt]]
        assert again[0] is opt and type(opt).__module__.startswith("horovod")
print("well")
"""
    assert output_of(site_folder, program) == "well\n"


def test_env_sets_variables_for_a_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from horoclone.common import util

    monkeypatch.setenv("HC_TEST_OLD", "before")
    monkeypatch.delenv("HC_TEST_NEW", raising=False)
    with pytest.raises(KeyError):
        with util.env(HC_TEST_OLD="within", HC_TEST_NEW="1", HC_TEST_NONE=None):
            assert os.environ["HC_TEST_OLD"] == "within" and os.environ["HC_TEST_NEW"] == "1"
            assert "HC_TEST_NONE" not in os.environ
            raise KeyError
    assert os.environ["HC_TEST_OLD"] == "before" and "HC_TEST_NEW" not in os.environ


@pytest.mark.parametrize(
    ("version", "target", "answer"),
    [
        ("2.1.0", "2.1.0", True), ("2.1.0+cu118", "2.1.0", True), ("2.1", "2.1.0", True), ("10.0.1", "9.9.9", True),
        ("2.0.9", "2.1.0", False), ("2.1.0rc1", "2.1.0", False), ("2.1.0.dev3", "2.1.0", False), ("2.1.1a0", "2.1.0", True),
        ("2.1.0.post1", "2.1.0", True), ("v1.2.3", "1.2.3", True), ("2.0.0.1", "2.0.0", True),
    ],
)  # fmt: skip
def test_versions_compare_by_number(version: str, target: str, answer: bool) -> None:
    from horoclone.common import util

    assert util.is_version_greater_equal_than(version, target) is answer


def test_small_functions_of_horovods_util() -> None:
    from horoclone.common import util
    from horoclone.launch import inventory

    for version, target in (("2.1.0", "2.1"), (2, "2.1.0"), ("x", "2.1.0")):
        with pytest.raises(ValueError, match=r"major\.minor\.patch|two strings|not a version"):
            util.is_version_greater_equal_than(version, target)  # type: ignore[arg-type]
    assert util.split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert util.split_list([1], 2) == [[1], []]
    assert [n for n in range(-1, 17) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.is_iterable("ab") and util.is_iterable({}) and not util.is_iterable(3)
    assert util.get_ext_suffix().endswith(".so")
    found = inventory.core()["devices"]
    usable = found["cuda"]["found"] and found["nccl"]["found"]
    assert util.gloo_built() and util.nccl_built(verbose=True) == (found["nccl"]["code"] if usable else 0)
    assert util.gpu_available("torch") == found["cuda"]["found"]
    assert not util.extension_available("mxnet") and not util.extension_available("no such")
    with pytest.raises(ImportError, match="no binding for mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    util.check_installed_version("torch", "0.0.1")
    calls: list[int] = []
    remembered = util._cache(lambda number: calls.append(number) or number)
    assert remembered(4) == remembered(4) == 4 and calls == [4]


def test_the_installation_has_no_pth_file_of_ours_and_no_horovodrun() -> None:
    # An older build has left an egg-info folder in the source tree, and with the tree on the path it is found first; what
    # pip installed, and will remove, is the distribution that has a record.
    installed = [
        found for found in importlib.metadata.distributions(name="horoclone") if found.read_text("RECORD")
    ]
    assert len(installed) == 1, "horoclone is not installed: pip install -e ."
    files = [str(path) for path in installed[0].files or ()]
    # The build backend's own file in an editable install, and ours, which has a path and no code (docs/decisions/packaging.md).
    ours = {name for name in files if name.endswith(".pth")} - {
        "_editable_skbc_horoclone.pth",
        "_horoclone_editable.pth",
    }
    assert not ours, "the installation is older than this tree: pip install -e ."
    commands = {entry.name for entry in installed[0].entry_points}
    assert "horovodrun" not in commands and "horoclonerun" in commands


def test_stand_ins_cannot_be_pickled_by_accident() -> None:
    from horoclone.stand_ins import stand_in

    with pytest.raises(pickle.PicklingError):
        pickle.dumps(stand_in("horovod.mxnet.DistributedTrainer", "use horoclonerun"))
