"""The parts of horoclone.spark that need neither PySpark nor Java: shards, stores, places, names, the driver's task server."""

from __future__ import annotations

import importlib
import secrets
import socket
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import run_python, until

from horoclone.bootstrap import wire
from horoclone.errors import HorovodInternalError, Unsupported
from horoclone.launch.output import STDERR, STDOUT, Style
from horoclone.spark import conf, executor, runner
from horoclone.spark.common.store import FilesystemStore, LocalStore, Store
from horoclone.spark.data.columns import SCALAR, VECTOR, Column, check_present, check_shapes
from horoclone.spark.data.preparing import check_validation
from horoclone.spark.data.reading import Transformation, transform
from horoclone.spark.data.shards import chunks, order_of, rows_per_rank, shard
from horoclone.spark.jobs import StreamScreen, environment_of, placements_of
from horoclone.spark.task_server import Task, TaskServer, bindings


@settings(deadline=None, max_examples=200)
@given(
    groups=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    size=st.integers(1, 9),
    seed=st.one_of(st.none(), st.integers(0, 1 << 31)),
    epoch=st.integers(0, 5),
)
def test_each_row_of_an_epoch_belongs_to_one_rank(
    groups: list[int], size: int, seed: int | None, epoch: int
) -> None:
    order = order_of(len(groups), seed, epoch)
    assert sorted(order) == list(range(len(groups))) and order == order_of(len(groups), seed, epoch)
    rows = sum(groups)
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        ranges = shard(groups, order, rank, size)
        mine = [(one.group, row) for one in ranges for row in range(one.start, one.stop)]
        assert 1 <= len(mine) <= rows_per_rank(rows, size)
        assert rows < size or len(mine) >= rows // size
        assert [one for part in chunks(ranges, 7) for one in part] == ranges
        seen.update(mine)
    assert set(seen) == {(group, row) for group, count in enumerate(groups) for row in range(count)}
    assert rows < size or max(seen.values()) == 1


def test_the_order_of_row_groups_changes_with_the_epoch() -> None:
    orders = [tuple(order_of(20, 7, epoch)) for epoch in range(4)]
    assert len(set(orders)) == 4 and order_of(20, None, 3) == list(range(20))


def test_a_transformation_edits_and_removes_columns() -> None:
    def half(row: dict[str, Any]) -> dict[str, Any]:
        return {"a": row["a"] / 2, "b": row["b"], "sum": row["a"].sum()}

    batch = {"a": np.arange(6.0).reshape(3, 2), "b": np.arange(3)}
    how = Transformation(half, [("a", np.float32, (2, 1), False)], ["b"])
    made = transform(batch, how)
    assert sorted(made) == ["a", "sum"] and made["a"].dtype == np.float32 and made["a"].shape == (3, 2, 1)
    assert made["sum"].tolist() == [1.0, 5.0, 9.0] and made["a"][2, :, 0].tolist() == [2.0, 2.5]
    assert transform(batch, Transformation()) is batch


def test_ranks_are_grouped_by_machine_and_the_first_task_s_machine_comes_first() -> None:
    machines = ["b", "a", "b", "c", "a", "b"]
    tasks = [Task(f"task-{i}.0@{m}", i, 0, m, f"{m}-hash") for i, m in enumerate(machines)]
    placed = placements_of(list(reversed(tasks)))
    assert [one.host for one in placed] == [
        "task-0.0@b", "task-2.0@b", "task-5.0@b", "task-1.0@a", "task-4.0@a", "task-3.0@c",
    ]  # fmt: skip
    assert [(one.rank, one.local_rank, one.local_size) for one in placed] == [
        (0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 0, 2), (4, 1, 2), (5, 0, 1),
    ]  # fmt: skip
    assert [(one.cross_rank, one.cross_size) for one in placed] == [
        (0, 3), (0, 2), (0, 1), (1, 3), (1, 2), (2, 3),
    ]  # fmt: skip


def test_ranks_get_settings_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HOROVOD_FUSION_THRESHOLD": "7", "HOROCLONE_SECRET": "s" * 20, "HOROVOD_RANK": "3", "HOROCLONE_MEMBER": "ab",
        "HOROVOD_LOCAL_SIZE": "2", "PATH_OF_DRIVER": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    made = environment_of({"MINE": "1", "HOROCLONE_SECRET": "t" * 20}, ["eth0"], 12)
    assert (
        made["HOROVOD_FUSION_THRESHOLD"] == "7"
        and made["MINE"] == "1"
        and made["HOROVOD_GLOO_IFACE"] == "eth0"
    )
    assert made["HOROVOD_START_TIMEOUT"] == "12"
    left = set(made) & {
        "HOROCLONE_SECRET",
        "HOROVOD_RANK",
        "HOROCLONE_MEMBER",
        "HOROVOD_LOCAL_SIZE",
        "PATH_OF_DRIVER",
    }
    assert not left


def test_a_store_has_its_places_and_keeps_files(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = Store.create(str(tmp_path))
    assert isinstance(store, FilesystemStore) and isinstance(LocalStore(str(tmp_path)), FilesystemStore)
    prefix = tmp_path.as_uri()
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{prefix}/intermediate_val_data.3"
    assert (
        store.get_checkpoint_path("r") == f"{prefix}/runs/r"
        and store.get_logs_path("r") == f"{prefix}/runs/r/logs"
    )
    path = f"{store.get_checkpoint_path('r')}/a.ckpt"
    assert not store.exists(path) and store.get_checkpoints("r") == []
    store.write(path, b"content")
    assert store.exists(path) and store.read(path) == b"content"
    assert [Path(one).name for one in store.get_checkpoints("r")] == ["a.ckpt"]
    with store.get_local_output_dir_fn("r")() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "events").write_text("x")
        store.sync_fn("r")(folder)
    assert store.read(f"{prefix}/runs/r/logs/events") == b"x"
    store.remove(store.get_run_path("r"))
    store.remove(store.get_run_path("r"))
    assert not store.exists(path)
    elsewhere = FilesystemStore(str(tmp_path), train_path="memory://train", save_runs=False)
    assert elsewhere.get_train_data_path() == "memory://train" and elsewhere.get_checkpoint_path("r") is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Store.create("hdfs://namenode/x"), "Store.create('/mnt/...')"),
        (lambda: importlib.import_module("horoclone.spark.common.store").HDFSStore("/x"), "shared folder"),
        (lambda: Store.create("dbfs:/x"), "/dbfs/"),
    ],
)
def test_stores_that_are_not_there_say_what_to_do(make: Any, said: str) -> None:
    with pytest.raises(Unsupported, match="has not been tried|every node") as caught:
        make()
    assert said in str(caught.value)


def test_what_is_wrong_with_columns_names_the_parameter() -> None:
    with pytest.raises(ValueError, match="feature_cols: 'x' is not among the columns of the DataFrame: a, b"):
        check_present({"feature_cols": ["a", "x"]}, ["a", "b"], "the DataFrame")
    columns = {
        "a": Column(VECTOR, "double", 64),
        "b": Column(SCALAR, "int", 1),
        "c": Column(VECTOR, "double", 0),
    }
    check_shapes("input_shapes", ["a", "b", "c"], [[-1, 8, 8], [-1], [-1, 5]], columns)
    with pytest.raises(ValueError, match="input_shapes: column 'a' has 64 values in a row, the shape"):
        check_shapes("input_shapes", ["a"], [[-1, 65]], columns)
    with pytest.raises(ValueError, match="2 shapes for 1 columns"):
        check_shapes("input_shapes", ["a"], [[-1, 64], [-1]], columns)
    for bad in (1.0, -0.1, True, "", [0.1]):
        with pytest.raises(ValueError, match="validation="):
            check_validation(bad)
    for good in (None, 0, 0.2, "is_val"):
        check_validation(good)


def test_horovods_settings_of_spark_are_there() -> None:
    pairs = [getattr(conf, name) for name in dir(conf) if name.startswith("SPARK_CONF_")]
    assert conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK == ("spark.task.maxFailures", "2147483647")
    assert {pair[0] for pair in pairs if isinstance(pair, tuple)} <= set(conf.SPARK_CONF_DEFAULT_VALUES)
    assert sum(isinstance(pair, tuple) for pair in pairs) == 17


def test_lines_go_to_the_streams_that_are_given() -> None:
    import io

    out, err = io.StringIO(), io.StringIO()
    screen = StreamScreen(Style(), out, err)
    screen.show(1, STDOUT, [b"hello", b"\xff"])
    screen.show(0, STDERR, [b"oh"])
    assert out.getvalue() == "[1] hello\n[1] \N{REPLACEMENT CHARACTER}\n" and err.getvalue() == "[0] oh\n"
    out.close()
    screen.show(1, STDOUT, [b"more"])
    assert screen.broken
    lines: list[str] = []
    screen = StreamScreen(Style(), cast(Any, types.SimpleNamespace(write=lines.append)), err)
    screen.show(0, STDOUT, [b"as print() writes"])
    assert lines == ["[0] as print() writes\n"] and not screen.broken


# --- the task server


@pytest.fixture
def server() -> Any:
    made = TaskServer(secrets.token_bytes(32), "job", ["127.0.0.1"])
    yield made
    made.close()


def knock(server: TaskServer, partition: int, secret: bytes | None = None, **facts: Any) -> socket.socket:
    offer = executor.Offer(tuple(server.own_addresses), secret or server.secret, "job", None)
    connection = executor._Knock(list(offer.addresses), offer.secret, offer.job, 5.0).open(False)
    import json

    said = {**json.loads(executor._introduction(partition, 0)), **facts}
    connection.sendall(wire.frame(json.dumps(said).encode()))
    return connection


def nothing() -> None:
    pass


def test_tasks_that_have_proved_the_secret_wait_for_a_rank(server: TaskServer) -> None:
    connections = [knock(server, partition) for partition in (1, 0)]
    tasks = server.wait(2, 10, nothing)
    assert [task.partition for task in tasks] == [0, 1] and tasks[0].host == socket.gethostname()
    assert server.is_ready(tasks[0].name) and {host.name for host in server.find()} == {
        task.name for task in tasks
    }
    connections[1].close()  # the task of partition 0 is lost
    until(lambda: not server.is_ready(tasks[0].name), 10)
    assert server.wait(2, 0.2, nothing) == [tasks[1]]
    server.close()
    assert connections[0].recv(10) == executor.END
    connections[0].close()


def test_an_unauthenticated_peer_is_not_let_in(server: TaskServer) -> None:
    with pytest.raises(HorovodInternalError):
        knock(server, 0, secrets.token_bytes(32))
    with socket.create_connection(("127.0.0.1", int(server.own_addresses[0].rpartition(":")[2]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        assert stranger.recv(wire.GREETING_BYTES)
    assert server.wait(1, 0.3, nothing) == []
    with knock(server, 0):
        assert len(server.wait(1, 10, nothing)) == 1


def test_a_task_gets_in_past_unauthenticated_peers_that_say_nothing(server: TaskServer) -> None:
    port = int(server.own_addresses[0].rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(150)]
    with knock(server, 0):
        assert len(server.wait(1, 10, nothing)) == 1
    for one in idle:
        one.close()


def test_a_task_gets_in_once_there_are_descriptors_and_threads(
    server: TaskServer, shortage: Callable[[str, str], list[str]]
) -> None:
    left = shortage("hc-spark-tasks", "hc-spark-tasks-in")
    with knock(server, 0):
        assert len(server.wait(1, 10, nothing)) == 1 and not left


def test_the_end_of_an_old_connection_is_not_that_of_a_task_that_has_come_again(server: TaskServer) -> None:
    with knock(server, 0):
        name = server.wait(1, 10, nothing)[0].name
        old = server._waiting[name][1]
        with knock(server, 0):
            until(lambda: server._waiting[name][1] is not old, 10)
            server._look_at(name, old)  # the selector had seen its end before
            assert server.is_ready(name)


@pytest.mark.parametrize("name", ["horoclone", "Python", "cloudpickle"])
def test_another_version_on_a_node_is_refused_with_both(server: TaskServer, name: str) -> None:
    from horoclone.launch.usage import LaunchError

    versions = {**executor.own_versions(), name: "0.0.1"}
    with knock(server, 0, versions=versions, host="node17"):
        with pytest.raises(
            LaunchError, match=f"node node17 runs {name} 0.0.1 .*the driver {name} "
        ) as caught:
            server.wait(1, 10, nothing)
    assert "PYSPARK_PYTHON" in str(caught.value)


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_end_of_a_job_does_not_wait_for_tasks_that_spark_has_no_room_for(
    tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = types.SimpleNamespace(joined=False, cancel=lambda: None)
    stage.join = lambda limit_s: setattr(stage, "joined", True)
    monkeypatch.setattr(runner, "Stage", lambda *_: stage)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "job")
    monkeypatch.setattr(runner, "_tasks", lambda _context, _spec, server, _stage: knock(server, 0))
    broadcast = types.SimpleNamespace(destroy=lambda: None)
    context: Any = types.SimpleNamespace(master="local[2]", broadcast=lambda _: broadcast)
    spec: Any = types.SimpleNamespace(
        what="run", nics=None, python=None, call=b"", wanted=1, tasks=tasks, barrier=False
    )
    connection: Any
    with runner._opened(context, spec) as (server, _, connection):
        server.wait(1, 10, nothing)
    connection.close()
    assert stage.joined == (tasks == 1)


def test_executors_of_this_host_only_are_reached_over_loopback() -> None:
    assert bindings("local[4]", None) == bindings("local-cluster[2,1,1024]", None) == ["127.0.0.1"]
    assert bindings("spark://host:7077", ["lo"]) == ["127.0.0.1"]
    with pytest.raises(ValueError, match="nowhere0"):
        bindings("yarn", ["nowhere0"])


def test_a_task_whose_driver_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "REACH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    offer = executor.Offer((address,), secrets.token_bytes(32), "job", None)
    with pytest.raises(RuntimeError, match=r"Spark task 3 on .* cannot reach the driver.*nics="):
        executor.serve(offer, b"", 3, 0, [])


def test_nothing_of_spark_is_loaded_before_it_is_asked_for() -> None:
    code = (
        "import sys, horoclone.spark, horoclone.spark.conf, horoclone.spark.common.store, horoclone.spark.common.backend\n"
        "print(sorted({'pyspark', 'pyarrow', 'pandas', 'fsspec', 'torch', 'tensorflow'} & set(sys.modules)))"
    )
    done = run_python(code, check=True)
    assert done.stdout == "[]\n"


def test_without_pyspark_it_is_said_how_to_get_it() -> None:
    block = "import sys\nsys.modules['pyspark'] = None\n"
    code = (
        block + "import horoclone.spark as s\ntry: s.run(print)\nexcept s.runner.Unsupported as e: print(e)\n"
    )
    code += "try: import horoclone.spark.torch\nexcept ImportError as e: print(e)\n"
    done = run_python(code, check=True)
    assert done.stdout.count("pip install pyspark pyarrow pandas fsspec") == 2, done


def test_a_pyspark_that_is_too_old_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("__version__ = '3.1.2'\n")
    code = "import horoclone.spark as s\ntry: s.run(print)\nexcept s.runner.Unsupported as e: print(e)\n"
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}", check=True)
    assert "PySpark 3.1.2 is installed; horoclone.spark needs 4.0 or newer" in done.stdout


def test_a_java_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from horoclone.spark.session import java_trouble

    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "has no bin/java" in java_trouble()
    for version, is_fine in (("1.8.0_402", False), ("17.0.15", True), ("21", True)):
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025' >&2\n")
        java.chmod(0o755)
        assert (java_trouble() == "") is is_fine, version
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    assert "Java 17 or newer" in java_trouble()


def test_gpus_of_a_task_are_told_to_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from horoclone.spark.task import GPUS, get_available_devices

    monkeypatch.delenv(GPUS, raising=False)
    assert get_available_devices() == []
    monkeypatch.setenv(GPUS, "0,3")
    assert get_available_devices() == ["0", "3"]
