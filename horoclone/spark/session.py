"""The Spark application that a job runs in, and the Spark job whose tasks are its slots."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from horoclone.errors import Timeout, Unsupported

OLDEST_PYSPARK = (4, 0)  # as in pyproject.toml
OLDEST_JAVA = 17  # for PySpark 4
_INSTALL = "pip install pyspark pyarrow pandas fsspec"
_REASON = re.compile(
    r"(?:Lost task|Reason:|ExecutorLostFailure|Could not recover|\w+(?:Error|Exception): ).*"
)
_jobs = itertools.count(1)


def pyspark_module() -> Any:
    """The module. Unsupported when it is not installed, or older than what this is made for."""
    try:
        import pyspark
    except ImportError as error:
        raise Unsupported(
            f"horoclone.spark needs PySpark, which cannot be imported ({error}): {_INSTALL}"
        ) from None
    found = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:2])
    if found < OLDEST_PYSPARK:
        oldest = ".".join(map(str, OLDEST_PYSPARK))
        raise Unsupported(
            f"PySpark {pyspark.__version__} is installed; horoclone.spark needs {oldest} or newer: {_INSTALL}"
        )
    return pyspark


def active_context() -> Any:
    """The SparkContext of this process. Unsupported, with what is missing, when there is none."""
    pyspark = pyspark_module()
    context = pyspark.SparkContext._active_spark_context
    if context is not None:
        return context
    if os.environ.get("SPARK_REMOTE") or os.environ.get("SPARK_CONNECT_MODE_ENABLED"):
        more = (
            "This is a Spark Connect client, which has no SparkContext; run the program where the driver is, in a "
            "classic session (unset SPARK_REMOTE)."
        )
    else:
        more = "Make one first: SparkSession.builder.getOrCreate()." + java_trouble()
    raise Unsupported(f"Could not find an active SparkContext, are you running in a PySpark session? {more}")


def java_trouble() -> str:
    """What is wrong with the Java that Spark would start; empty when nothing seems to be."""
    home = os.environ.get("JAVA_HOME", "")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        where = (
            f"JAVA_HOME={home} has no bin/java" if home else "java is not on PATH and JAVA_HOME is not set"
        )
        advice = "Debian: apt-get install openjdk-17-jre-headless"
        return f" Spark needs Java {OLDEST_JAVA} or newer, and {where} ({advice})."
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return f" Spark needs Java {OLDEST_JAVA} or newer, and {java} cannot be run: {error}."
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    if match and int(match.group(1)) < OLDEST_JAVA:
        found = match.group(1)
        return (
            f" Spark needs Java {OLDEST_JAVA} or newer, and {java} is Java {found}: set JAVA_HOME to another."
        )
    return ""


def slots_of(context: Any) -> int:
    """How many tasks the application can run at the same time now, as far as Spark says."""
    try:
        pool = context._jsc.sc()
        return int(pool.maxNumConcurrentTasks(pool.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # of a Spark that has it under another name
        return int(context.defaultParallelism)


def too_few(context: Any, what: str, wanted: int, came: int, limit_s: float) -> Timeout:
    """The error about tasks that Spark has not started in time."""
    return Timeout(
        f"{what}: {came} of {wanted} Spark tasks were started within {limit_s:g} s (start_timeout). Each rank runs in "
        f"a Spark task, and the application has slots for {slots_of(context)} at the same time now. Ask for fewer "
        "ranks (num_proc), give the application more executors or cores, wait for other jobs of it to end, or raise "
        "start_timeout where executors come on demand."
    )


class Stage:
    """A Spark job with `count` tasks, each of which calls function(index, rows). Thread: hc-spark-stage.

    barrier: all tasks start together or none does, and when one is lost Spark ends them all.
    """

    def __init__(
        self, context: Any, count: int, function: Callable[[int, Any], Any], barrier: bool, description: str
    ) -> None:
        self._context, self._count, self._function, self._barrier = context, count, function, barrier
        self.group = f"horoclone.spark.{os.getpid()}.{next(_jobs)}"
        self._description = description
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hc-spark-stage", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def cancel(self) -> None:
        """Ends its tasks, and waits a while for that."""
        if not self.over:
            try:
                self._context.cancelJobGroup(self.group)
            except Exception:
                return  # the application is gone, and the tasks with it
            self.join(10.0)

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self.group, self._description, True)
            rows = self._context.range(0, self._count, numSlices=self._count)
            (rows.barrier() if self._barrier else rows).mapPartitionsWithIndex(self._function).collect()
        except Exception as error:
            self.error = error

    def reason(self) -> str:
        """What Spark says about its end, in one line; empty when it has not failed."""
        if self.error is None:
            return ""
        text = str(self.error)
        if "No module named 'horoclone'" in text:
            return "horoclone is not installed for the executors' Python: install it on every node"
        lines = [line.strip() for line in text.splitlines()]
        found = [
            match.group(0) for line in lines if (match := _REASON.search(line)) and not line.startswith("at ")
        ]
        reasons = [line for line in found if "ExecutorLostFailure" in line or "Reason:" in line]
        chosen = reasons or found or [line for line in lines if line] or [type(self.error).__name__]
        return chosen[0][:600]
