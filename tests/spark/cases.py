"""What runs in the driver of an application (conftest.py): a function for each case, and what its ranks do.

python cases.py MASTER reads {"number", "case", "arguments"} as lines of JSON, and prints a REPLY for each. A case of
another file here is FILE.FUNCTION.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def session(master: str) -> Any:
    from pyspark.sql import SparkSession

    made = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .getOrCreate()
    )
    made.sparkContext.setLogLevel("OFF")
    return made


# --- ranks


def told(value: int) -> Any:
    import numpy as np

    import horoclone as hvd

    hvd.init()
    print(f"rank {hvd.rank()} is here")
    print(f"rank {hvd.rank()} complains", file=sys.stderr)
    total = float(hvd.allreduce(np.float32(hvd.rank() + value), name="x", op=hvd.Sum))
    secret_names = [name for name in os.environ if "SECRET" in name and not name.endswith("_FD")]
    return [hvd.rank(), hvd.local_rank(), hvd.local_size(), total, secret_names, os.environ.get("COLOUR")]


def pid_of_executor() -> int:
    """Of the JVM above this process; 0 where the driver's is the only one."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if b"java" in words[0] and any(b"CoarseGrainedExecutorBackend" in word for word in words):
            return pid
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return 0


def steps(folder: str, count: int, pause_s: float, until_grown: bool = False) -> Any:
    """Trains elastically on NumPy; each rank says where it is by files in the folder. until_grown: goes on until a rank
    was lost and another one has come."""
    import numpy as np

    import horoclone as hvd
    from horoclone.arrays import functions  # noqa: F401
    from horoclone.elastic.run import run_fn
    from horoclone.elastic.state import ObjectState
    from horoclone.objects import broadcast_object

    hvd.init()

    def reset() -> None:
        hvd.shutdown()
        hvd.init()

    state = ObjectState(broadcast_object, hvd.rank, step=0, total=0.0, smallest=2)

    def train(state: Any) -> list[Any]:
        generations = [hvd.size()]
        while state.step < count or (until_grown and not hvd.size() > state.smallest):
            state.smallest = min(state.smallest, hvd.size())
            total = hvd.allreduce(np.ones(1), name="one", op=hvd.Sum)
            assert total[0] == hvd.size()
            state.total += float(total[0]) / hvd.size()
            state.step += 1
            if state.step == 3:
                Path(folder, f"pid.{os.getpid()}").write_text(json.dumps([hvd.rank(), pid_of_executor()]))
            Path(folder, f"at.{os.getpid()}").write_text(f"{state.step} {hvd.size()} {time.monotonic()}")
            time.sleep(pause_s)
            state.commit()
        return [hvd.rank(), hvd.size(), state.step, state.total, generations[0]]

    return run_fn(train, reset)(state)


def waits_for_a_peer() -> None:
    """Rank 0's executor is killed by the driver while rank 1 waits for it in a collective."""
    import numpy as np

    import horoclone as hvd

    hvd.init()
    Path(os.environ["CASE_FOLDER"], f"rank.{hvd.rank()}").write_text(str(pid_of_executor()))
    while True:
        hvd.allreduce(np.ones(4), name="step")
        time.sleep(0.05)


# --- cases


def run_twice(spark: Any) -> Any:
    import horoclone.spark

    out, err = io.StringIO(), io.StringIO()
    values = horoclone.spark.run(told, (1,), num_proc=2, env={"COLOUR": "green"}, stdout=out, stderr=err)
    again = horoclone.spark.run(told, kwargs={"value": 2}, num_proc=2, stdout=out, stderr=err)
    conf = json.dumps(dict(spark.sparkContext.getConf().getAll()))
    return {"values": values, "again": again, "out": out.getvalue(), "err": err.getvalue(), "conf": conf}


def failure_of(call: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "cause": repr(error.__cause__),
            "seconds": time.monotonic() - began,
        }
    return {"kind": "", "text": "it succeeded"}


def quiet(function: Any, *args: Any, **kwargs: Any) -> Any:
    import horoclone.spark

    kwargs = {"stdout": io.StringIO(), "stderr": io.StringIO(), "num_proc": 2, **kwargs}
    return horoclone.spark.run(function, *args, **kwargs)


def raises_before_init() -> None:
    import horoclone as hvd

    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("bad batch 17")
    hvd.init()


def errors(spark: Any) -> Any:
    import horoclone.spark

    found = {
        "before init": failure_of(lambda: quiet(raises_before_init)),
        "too few": failure_of(lambda: quiet(told, (1,), num_proc=5, start_timeout=3)),
        "elastic too few": failure_of(
            lambda: horoclone.spark.run_elastic(told, (1,), num_proc=5, min_num_proc=3, start_timeout=3)
        ),
        "mpi": failure_of(lambda: quiet(told, (1,), use_mpi=True)),
        "no function": failure_of(lambda: quiet(17)),
        "no ranks": failure_of(lambda: quiet(told, (1,), num_proc=0)),
        "timeout": failure_of(lambda: quiet(told, (1,), start_timeout=-1)),
        "sizes": failure_of(lambda: horoclone.spark.run_elastic(told, (1,), num_proc=2, min_num_proc=3)),
        "python": failure_of(lambda: quiet(told, (1,), executable="/no/such/python")),
    }
    return {"found": found, "after": [one[:4] for one in quiet(told, (1,))]}


def two_at_once(spark: Any) -> Any:
    values: dict[int, Any] = {}

    def one(value: int) -> None:
        values[value] = quiet(told, (value,), num_proc=1)

    threads = [threading.Thread(target=one, args=(value,)) for value in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return {str(value): found for value, found in values.items()}


def executor_killed(spark: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:

        def kill() -> None:
            path, other = Path(folder, "rank.1"), Path(folder, "rank.0")
            while not (path.exists() and other.exists() and path.read_text()):
                time.sleep(0.05)
            time.sleep(0.3)
            os.kill(int(path.read_text()), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        found = failure_of(lambda: quiet(waits_for_a_peer, env={"CASE_FOLDER": folder}))
    return found, [one[0] for one in quiet(told, (1,), start_timeout=200)]


def elastic_executor_killed(spark: Any, pause_s: float, count: int) -> Any:
    import horoclone.spark

    out, killed_at = io.StringIO(), [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:

        def kill() -> None:
            while len(found := list(Path(folder).glob("pid.*"))) < 2:
                time.sleep(0.02)
            victims = {path: json.loads(path.read_text()) for path in found}
            path = next(path for path, (rank, _) in victims.items() if rank == 1)
            other = next(one for one in victims if one != path)
            survivor = Path(folder, other.name.replace("pid", "at"))
            os.kill(victims[path][1], signal.SIGKILL)
            killed_at[0] = time.monotonic()
            while time.monotonic() < killed_at[0] + 60:
                _, size, at = [*survivor.read_text().split(), "0", "0", "0"][:3]
                if size == "1" and float(at) > killed_at[0]:
                    killed_at[1] = float(at)
                    return
                time.sleep(0.005)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        values = horoclone.spark.run_elastic(
            steps, (folder, count, pause_s, True), num_proc=2, min_num_proc=1, max_num_proc=2, stdout=out, stderr=out,
            elastic_timeout=120,
        )  # fmt: skip
        thread.join(60)
        workers = len(list(Path(folder).glob("at.*")))
    return {
        "values": values,
        "recovered_s": killed_at[1] - killed_at[0],
        "workers": workers,
        "out": out.getvalue(),
    }


def elastic_fails(spark: Any) -> Any:
    import horoclone.spark

    def call() -> None:
        horoclone.spark.run_elastic(
            raises_before_init, num_proc=2, elastic_timeout=120, stdout=io.StringIO(), stderr=io.StringIO()
        )

    return failure_of(call)


def dies_while_ranks_run(spark: Any, folder: str, elastic: bool) -> None:
    """This driver is killed from outside."""
    import horoclone.spark

    if elastic:
        horoclone.spark.run_elastic(steps, (folder, 100000, 0.05), num_proc=2, min_num_proc=1)
    else:
        horoclone.spark.run(waits_for_a_peer, num_proc=2, env={"CASE_FOLDER": folder})


def distributor_rank(secret: str = "") -> Any:
    import numpy as np

    import horoclone as hvd

    if secret:
        os.environ["HOROCLONE_SECRET"] = secret
    hvd.init()
    total = float(hvd.allreduce(np.float32(hvd.rank() + 1), name="x", op=hvd.Sum))
    # In local mode all ranks write their values into one file, and the last one's is returned.
    return hvd.allgather_object([hvd.rank(), int(os.environ["RANK"]), hvd.size(), total])


def torch_distributor(spark: Any, local_mode: bool) -> Any:
    import cases
    from pyspark import cloudpickle
    from pyspark.ml.torch.distributor import TorchDistributor

    cloudpickle.register_pickle_by_value(cases)  # Spark has a copy of it
    given = () if local_mode else (secrets.token_hex(16),)
    runner = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    return runner.run(distributor_rank, *given)


def main() -> None:
    sys.path.insert(0, str(HERE))
    import cloudpickle

    spark = session(sys.argv[1])
    replies = sys.stdout
    for line in sys.stdin:
        asked = json.loads(line)
        head = {"number": asked["number"]}
        try:
            with contextlib.redirect_stdout(sys.stderr):
                module, _, name = asked["case"].rpartition(".")
                found = importlib.import_module(module or "cases")
                cloudpickle.register_pickle_by_value(found)  # its functions travel as those of a script do
                value = getattr(found, name)(spark, **asked["arguments"])
            reply = {**head, "value": value}
        except Exception:
            reply = {**head, "error": traceback.format_exc()}
        print("REPLY " + json.dumps(reply), file=replies, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
