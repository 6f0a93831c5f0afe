"""The library without TensorFlow, with one that is too old, and imported before it is configured."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from world import later, run_python

later("tensorflow")


ROOT = Path(__file__).resolve().parents[2]


def output_of(program: str) -> str:
    done = run_python(program, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_without_tensorflow_the_library_registers_nothing_and_says_why() -> None:
    spec: Any = importlib.util.find_spec("horoclone")
    path = Path(spec.origin).parent / "libhoroclone_tensorflow.so"
    program = f"""
import ctypes
library = ctypes.CDLL({str(path)!r})
library.hc_tensorflow_problem.restype = ctypes.c_char_p
print(library.hc_tensorflow_problem().decode())
"""
    assert output_of(program) == "libtensorflow_framework.so.2 is not loaded; import tensorflow first"
    assert ctypes.sizeof(ctypes.c_void_p) == 8


def test_a_tensorflow_that_is_too_old_is_refused_with_the_range() -> None:
    program = """
import sys, types
sys.modules["tensorflow"] = types.SimpleNamespace(__version__="2.12.1")
try:
    import horoclone.tensorflow
except ImportError as error:
    print(type(error).__name__, error)
"""
    output = output_of(program)
    assert output.startswith("HorovodVersionMismatchError") and "2.12.1" in output and "2.16" in output


def test_importing_leaves_tensorflow_unconfigured_and_horovods_names_are_these_modules() -> None:
    """Scripts choose their GPU and threads after `import` and `hvd.init()`, and the Keras that they want."""
    program = """
import sys
import tensorflow as tf
before = {m.split(".")[0] for m in sys.modules}
from horoclone import horovod_alias
horovod_alias.install()
import horovod.tensorflow as hvd
hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.set_visible_devices([], "GPU")
one = [tf.config.LogicalDeviceConfiguration()]
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], one)
new = {m.split(".")[0] for m in sys.modules} - before
assert not new & {"keras", "tf_keras", "torch", "jax"}, new
assert float(hvd.allreduce(tf.constant(2.0))) == 2.0 and tf.config.threading.get_inter_op_parallelism_threads() == 2

import horovod.tensorflow.mpi_ops, horovod.tensorflow.compression, horovod.tensorflow.functions
import horovod.tensorflow.util, horovod.tensorflow.elastic, horovod.tensorflow.data.compute_service
import horovod.tensorflow.sync_batch_norm
import horoclone.tensorflow, importlib
assert hvd is horoclone.tensorflow
for name in "mpi_ops compression functions util elastic sync_batch_norm data.compute_service".split():
    ours = importlib.import_module("horoclone.tensorflow." + name)
    assert importlib.import_module("horovod.tensorflow." + name) is ours, name
from horovod.tensorflow.mpi_ops import _allreduce, rank_op, size_op, _basics
from horovod.tensorflow.util import _executing_eagerly, vars_to_refs, refs_to_vars
assert hvd._executing_eagerly() and hvd.gpu_available("tensorflow") is False and _basics.size() == 1
v = tf.Variable(1.0)
assert refs_to_vars(vars_to_refs([v]))[0] is v
assert callable(hvd.elastic.run(print)) and callable(hvd.elastic.TensorFlowKerasState)
try:
    hvd.nothing
except AttributeError:
    print("absent")
"""
    assert output_of(program).split() == ["absent"]
