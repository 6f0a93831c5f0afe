"""Which launcher started us: a table of environments as real launchers make them."""

from __future__ import annotations

import os
import types

import pytest

from horoclone import errors
from horoclone.bootstrap import detect, exchange, launchers

OWN = {
    "HOROCLONE_RENDEZVOUS": "127.0.0.1:4000",
    "HOROCLONE_JOB": "j1",
    "HOROCLONE_RANK": "1",
    "HOROCLONE_SIZE": "4",
    "HOROCLONE_LOCAL_RANK": "1",
    "HOROCLONE_LOCAL_SIZE": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
ENV = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-node-812@1",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SBATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = {
    **SBATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)",
}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
ALONE = {
    **HOROVOD,
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "1",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size", "local_rank", "local_size"),
    [
        ({}, "single", 0, 1, 0, 1),
        ({"PATH": "/bin", "RANK": "3"}, "single", 0, 1, 0, 1),
        (OWN, "horoclone", 1, 4, 1, 2),
        ({"HOROCLONE_RENDEZVOUS": "h:1", **HOROVOD}, "horoclone", 1, 2, 1, 2),
        (TORCHRUN, "torchrun", 3, 4, 1, 2),
        (ENV, "env://", 3, 4, -1, -1),
        ({**ENV, "MASTER_ADDR": "localhost"}, "env://", 3, 4, 3, 4),
        ({**ENV, "MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "env://", 3, 4, -1, -1),
        ({**ENV, "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "env://", 3, 4, 1, 2),
        ({"WORLD_SIZE": "1"}, "single", 0, 1, 0, 1),
        (OPEN_MPI, "openmpi", 2, 3, 2, 3),
        (HYDRA, "hydra", 1, 2, 1, 2),
        (STEP, "slurm", 5, 8, 1, 2),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1"}, "slurm", 5, 8, 1, 8),
        (SBATCH, "single", 0, 1, 0, 1),
        ({**SBATCH, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "8"}, "single", 0, 1, 0, 1),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n@1"}, "pmix", 1, 0, -1, -1),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "mpi", 1, 2, -1, -1),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}, "mpi", 1, 2, 0, -1),
        (HOROVOD, "horovod", 1, 2, 1, 2),
        # precedence
        ({**OWN, **TORCHRUN, **OPEN_MPI, **HYDRA, **STEP, **HOROVOD}, "horoclone", 1, 4, 1, 2),
        ({**TORCHRUN, **OPEN_MPI, **STEP}, "torchrun", 3, 4, 1, 2),
        ({**OPEN_MPI, **STEP, **HOROVOD}, "openmpi", 2, 3, 2, 3),
        ({**HYDRA, **STEP}, "hydra", 1, 2, 1, 2),
        ({**STEP, **HOROVOD}, "slurm", 5, 8, 1, 2),
        # srun --mpi=pmi2 sets Hydra's names too
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "4"}, "slurm", 5, 8, 1, 2),
        # torchrun of one process in every task of a step is meant so
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **STEP},
         "torchrun", 0, 1, 0, 1),
        (ALONE, "horovod", 0, 1, 0, 1),
    ],
)  # fmt: skip
def test_placement(environ, launcher, rank, size, local_rank, local_size):
    found = detect.detect(environ)
    assert (found.launcher, found.rank, found.size) == (launcher, rank, size), found
    assert (found.local_rank, found.local_size) == (local_rank, local_size), found
    assert found.why


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPEN_MPI, True), (HYDRA, True), (HOROVOD, True), (TORCHRUN, False), (OWN, False), (ENV, False),
        ({}, True)
    ],
)  # fmt: skip
def test_one_host_only_when_the_launcher_says_so(environ, expected):
    assert detect.detect(environ).one_host is expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3"},
            "OMPI_COMM_WORLD_RANK=3 is not below OMPI_COMM_WORLD_SIZE=3",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x' is not a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "-4"}, "WORLD_SIZE='-4'"),
        ({**HYDRA, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2"),
        ({**HOROVOD, "HOROVOD_LOCAL_SIZE": "3"}, "HOROVOD_LOCAL_SIZE=3"),
        ({"HOROCLONE_RENDEZVOUS": "h:1"}, "HOROVOD_RANK is not"),
        ({"HOROCLONE_RENDEZVOUS": "h:1", "HOROCLONE_RANK": "0"}, "HOROVOD_SIZE is not"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_RANK is not; the launcher's environment did not arrive whole. If",
        ),
        ({**STEP, **ENV, "RANK": "0", "WORLD_SIZE": "1"}, ""),
    ],
)
def test_nonsense_is_refused(environ, text):
    with pytest.raises(errors.Unsupported) as caught:
        detect.detect(environ)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "2 processes, but MASTER_PORT is not set"),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK and MASTER_ADDR are not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_FD is not set"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_RANK is not set"),
        ({"HOROCLONE_SIZE": "2", "HOROCLONE_RANK": "1"}, "HOROCLONE_RENDEZVOUS is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ""),  # of a shell, for what it starts
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
    ],
)
def test_one_of_several_processes_is_not_taken_for_one_alone(environ, text):
    assert detect.detect(environ).launcher == "single"  # MPI may know better
    explained = detect.explain(environ)
    if not text:
        detect.refuse_some_of_several(environ)
        assert "launcher: single" in explained
        return
    with pytest.raises(errors.Unsupported) as caught:
        detect.refuse_some_of_several(environ)
    assert text in str(caught.value) and text in explained


@pytest.mark.parametrize("outer", [OPEN_MPI, HYDRA, STEP])
def test_stale_variables_never_make_singletons_of_a_launched_job(outer):
    alone = {**ENV, "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(errors.Unsupported, match="would each run alone"):
        detect.detect({**outer, **alone})


def test_the_launcher_decides_over_horovods_variables_of_size_one():
    assert detect.detect({**OPEN_MPI, **ALONE}).size == 3


def test_explain_names_the_decision_and_what_was_not_used():
    text = detect.explain({**OPEN_MPI, **STEP})
    assert "launcher: openmpi (rank 2 of 3)" in text and "one host" in text
    assert "not used: slurm, rank 5 of 8" in text
    assert "because no launcher" in detect.explain({})
    assert "cannot be used" in detect.explain({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "9"})


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node7", "node7"),
        ("gpu[003-004,009]", "gpu003"),
        ("gpu[12],login1", "gpu12"),
        ("a1,b2", "a1"),
        ("rack[1-2]-n5", "rack1-n5"),
    ],
)
def test_first_node_of_a_slurm_list(nodelist, first):
    assert launchers.first_slurm_node(nodelist) == first


def test_an_empty_slurm_list_is_refused():
    with pytest.raises(errors.Unsupported, match="names no node"):
        launchers.first_slurm_node("")


def test_the_first_task_of_slurm_is_where_its_file_says_when_tasks_are_placed_by_hand(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# by hand\nnode2*2\nnode1\n")
    step = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_HOSTFILE": str(file)}
    assert launchers.node_of_slurms_first_task(step) == "node1"
    by_hand = {**step, "SLURM_DISTRIBUTION": "arbitrary"}
    assert launchers.node_of_slurms_first_task(by_hand) == "node2"
    assert launchers.node_of_slurms_first_task({**by_hand, "SLURM_HOSTFILE": "/absent"}) == "node1"


def test_an_mpi_that_srun_does_not_know_is_not_called_another_mpis_mpirun():
    alone = types.SimpleNamespace(Get_size=lambda: 1)
    mpi = types.SimpleNamespace(COMM_WORLD=alone, Get_library_version=lambda: "Open MPI v5.0.11, package")
    found = detect.Placement("slurm", 0, 2, 0, 1, "slurm:1:0:0", "SLURM_STEP_ID is set, by srun")
    with pytest.raises(errors.Unsupported, match="srun has not told that MPI.*HOROCLONE_SECRET_FILE"):
        exchange._refuse_foreign_mpi(found, mpi)


def test_secrets_from_environment_and_file(tmp_path):
    assert launchers.shared_secret({}) == b""
    assert launchers.shared_secret({"HOROCLONE_SECRET": "0123456789abcdef\n"}) == b"0123456789abcdef"
    path = tmp_path / "secret"
    path.write_text("fedcba9876543210\n")
    path.chmod(0o600)
    assert launchers.shared_secret({"HOROCLONE_SECRET_FILE": str(path)}) == b"fedcba9876543210"


def test_a_secret_that_root_shows_a_group_is_taken_by_others_than_root(tmp_path, monkeypatch):
    """As the kubelet lays a secret for a pod with fsGroup; root itself, and any file of others, must be private."""
    path = tmp_path / "secret"
    path.write_text("fedcba9876543210")
    path.chmod(0o440)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1000)
    if owner == 0:
        assert launchers.shared_secret({"HOROCLONE_SECRET_FILE": str(path)}) == b"fedcba9876543210"
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(errors.Unsupported, match="chmod 600"):
        launchers.shared_secret({"HOROCLONE_SECRET_FILE": str(path)})


def test_bad_secrets_are_refused_without_being_shown(tmp_path):
    path = tmp_path / "secret"
    path.write_text("fedcba9876543210")
    path.chmod(0o644)
    for environ, text in (
        ({"HOROCLONE_SECRET": "hunter2"}, "too short"),
        ({"HOROCLONE_SECRET_FILE": str(path)}, "chmod 600"),
        ({"HOROCLONE_SECRET_FILE": str(tmp_path / "none")}, "No such file"),
        ({"HOROCLONE_SECRET_FD": "999"}, "HOROCLONE_SECRET_FD=999"),
        ({"HOROCLONE_SECRET_FD": "x"}, "HOROCLONE_SECRET_FD=x"),
    ):
        with pytest.raises(errors.Unsupported) as caught:
            launchers.shared_secret(environ)
        assert text in str(caught.value)
        assert "hunter2" not in str(caught.value) and "fedcba" not in str(caught.value)


def test_derived_ports_depend_on_secret_and_job_only():
    ports = launchers.derived_ports(b"s" * 16, "job")
    assert ports == launchers.derived_ports(b"s" * 16, "job")
    assert ports != launchers.derived_ports(b"t" * 16, "job") != launchers.derived_ports(b"t" * 16, "job2")
    assert all(20000 <= port < 32000 for port in ports) and len(ports) == launchers.DERIVED_PORTS
