"""tf.data's service on two compute ranks, read by training ranks in another process."""

from __future__ import annotations

import stat
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from world import later

from horoclone import errors

tf = later("tensorflow")
compute_service = later("horoclone.tensorflow.data.compute_service")


def test_two_workers_feed_two_training_ranks(launch: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    launcher = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2"]
    job = launch.start(
        [*launcher, sys.executable, "-m", "horoclone.tensorflow.data.compute_worker", file, "--timeout", "50"]
    )
    config = compute_service.TfDataServiceConfig.read(str(file), wait_for_file_creation=True, timeout=60)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "the key is in it"
    assert compute_service.TfDataServiceConfig.from_dict(config.to_dict()) == config
    assert (config.dispatchers, config.workers_per_dispatcher, config.dispatcher_side) == (1, 2, "compute")

    numbers = tf.data.Dataset.range(40).map(lambda x: x * 10)
    # One pass shared by both training ranks, each element once: both workers of both jobs have a part of it.
    shared = [numbers.send_to_data_service(config, rank, 2, reuse_dataset=True) for rank in range(2)]
    received = [int(x) for dataset in shared for x in dataset]
    assert sorted(received) == [10 * i for i in range(40)]
    # A pass of one's own.
    alone = numbers.send_to_data_service(config, 0, processing_mode="parallel_epochs")
    assert sorted(int(x) for x in alone) == sorted(2 * [10 * i for i in range(40)]), "once from each worker"

    # In turns: everybody takes equally many, and no element twice.
    taken: list[list[int]] = [[], []]

    def take(rank: int) -> None:
        endless = tf.data.Dataset.range(1000).repeat()
        turns = endless.send_to_data_service(
            config, rank, 2, "parallel_epochs", reuse_dataset=True, round_robin=True
        )
        taken[rank] = [int(x) for x in turns.take(6)]

    both = [threading.Thread(target=take, args=(rank,)) for rank in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert sorted(map(len, taken)) == [6, 6]
    assert max(Counter(taken[0] + taken[1]).values()) <= 2, "at most once from each worker"

    stranger = compute_service.ComputeClient(config.addresses, b"x" * 32, 1.0)
    with pytest.raises((errors.HorovodInternalError, ValueError)):
        stranger.shutdown()
    client = config.compute_client()
    client.shutdown()
    client.close()
    done = job.finish(60)
    assert done.returncode == 0, done.output
    assert not job.left_over()


@pytest.mark.long(25)
def test_each_training_rank_may_have_a_dispatcher_and_a_worker_of_its_own(
    launch: Any, tmp_path: Path
) -> None:
    file = tmp_path / "service.json"
    launcher = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2"]
    worker = [sys.executable, "-m", "horoclone.tensorflow.data.compute_worker", file, "--dispatchers", "2"]
    job = launch.start([*launcher, *worker, "--dispatcher-side", "training"])
    config = compute_service.TfDataServiceConfig.read(str(file), wait_for_file_creation=True, timeout=60)
    with pytest.raises(RuntimeError, match="tf_data_service"):
        tf.data.Dataset.range(3).send_to_data_service(config, 0)
    assert (config.dispatchers, config.workers_per_dispatcher) == (2, 1)
    for rank in range(2):
        with compute_service.tf_data_service(config, rank) as address:
            service = tf.data.experimental.service.distribute("distributed_epoch", address)
            assert [int(x) for x in tf.data.Dataset.range(10).apply(service)] == list(range(10))
    client = config.compute_client()
    client.shutdown()
    client.close()
    assert job.finish(60).returncode == 0


def test_a_file_that_never_comes_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(errors.Timeout, match="compute_worker"):
        compute_service.TfDataServiceConfig.read(
            str(tmp_path / "no"), wait_for_file_creation=True, timeout=0.2
        )
