"""--mpi and run(use_mpi=True): the job under Open MPI's and MPICH's own mpirun."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from horoclone.launch.hosts import Placement
from horoclone.launch.mpirun import Mpi, MpiRequest, command_line
from horoclone.launch.usage import LaunchError

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "horoclone.launch.cli"]
SUM = """
    import os, sys
    import numpy as np
    import horoclone as hvd
    hvd.init()
    total = hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum)
    threshold = os.environ.get("HOROVOD_FUSION_THRESHOLD")
    text = f"rank {hvd.rank()} of {hvd.size()} sum {total.tolist()} threshold {threshold} under MPI {hvd.mpi_enabled()}"
    os.write(1, (text + "\\n").encode())  # at once: two ranks share mpirun's output
    last = hvd.rank() == hvd.size() - 1
    hvd.shutdown()
    sys.exit(int(sys.argv[1]) if last else 0)
"""


@pytest.fixture(params=["open_mpi", "mpich"])
def mpi_env(request: Any) -> dict[str, str]:
    """The environment in which `mpirun` is this MPI's."""
    mpi = request.getfixturevalue(request.param)
    path = f"{Path(mpi.mpirun).parent}{os.pathsep}{os.environ['PATH']}"
    return {**{name: text for name, text in mpi.env.items() if "ROOT" not in name}, "PATH": path}


@pytest.mark.mpi
@pytest.mark.in_turn("mpi_env")
def test_the_flag_starts_the_ranks_with_mpirun(launch: Any, mpi_env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(textwrap.dedent(SUM))
    flags = ["--mpi", "--verbose", "-np", "2", "--fusion-threshold-mb", "4"]
    done = launch([*RUN, *flags, sys.executable, script, "0"], env=mpi_env, timeout_s=90)
    for rank in range(2):
        assert f"rank {rank} of 2 sum [1.0, 3.0, 5.0] threshold 4194304 under MPI True" in done.stdout
    assert "mpirun" in done.stderr or "mpiexec" in done.stderr
    failed = launch([*RUN, *flags, sys.executable, script, "3"], env=mpi_env, timeout_s=90, check=False)
    assert failed.returncode != 0


@pytest.mark.mpi
@pytest.mark.in_turn("mpi_env")
def test_run_brings_back_one_value_per_rank_and_the_first_error(
    launch: Any, mpi_env: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "calls.py"
    script.write_text(
        textwrap.dedent("""
        import json
        import horoclone
        import horoclone as hvd
        def work(factor):
            hvd.init()
            return factor * hvd.rank(), hvd.size(), hvd.mpi_enabled()
        def fail():
            raise KeyError("odd")
        values = horoclone.run(work, args=(10,), np=2, use_mpi=True)
        try:
            horoclone.run(fail, np=1, use_mpi=True)
        except RuntimeError as error:
            said = [str(error), repr(error.__cause__), error.rank]
        print("answer", json.dumps([values, said]))
    """)
    )
    done = launch([sys.executable, script], env={**mpi_env, "PYTHONPATH": str(ROOT)}, timeout_s=120)
    values, (text, cause, rank) = json.loads(done.stdout.split("answer ")[1].splitlines()[0])
    assert values == [[0, 2, True], [10, 2, True]]
    assert "rank 0 raised" in text and cause == "KeyError('odd')" and rank == 0


@pytest.mark.mpi
@pytest.mark.in_turn("mpi_env")
def test_output_files(launch: Any, mpi_env: dict[str, str], tmp_path: Path) -> None:
    flags = ["--mpi", "-np", "2", "--output-filename", tmp_path / "out"]
    launch([*RUN, *flags, sys.executable, "-c", "print('here I am')"], env=mpi_env, timeout_s=60)
    files = [path for path in (tmp_path / "out").rglob("*stdout*") if path.is_file()]
    assert len(files) == 2 and all("here I am" in path.read_text() for path in files)


def _request(*hosts: str, **more: Any) -> MpiRequest:
    names = [host for host in hosts for _ in range(2)]
    placements = [
        Placement(i, len(names), i % 2, 2, i // 2, len(hosts), name) for i, name in enumerate(names)
    ]
    return MpiRequest(
        placements, ["python", "x.py"], {"PATH": "/bin", "HOROVOD_X": "1", "HOME": "/h"}, **more
    )


def test_the_command_of_each_mpi() -> None:
    away = _request("localhost", "far.example", mpi_args="-mca a 'b c'", ssh_port=2222)
    arguments, environment = command_line(Mpi("mpirun", "Open MPI", 5), away)
    text = " ".join(arguments)
    assert "-np 4 -H localhost:2,far.example:2 --bind-to none --map-by slot --output tag" in text
    assert "--prtemca plm_ssh_args -p 2222" in text and "-x HOROVOD_X" in text and "-x HOME" not in text
    assert arguments[-5:] == ["-mca", "a", "b c", "python", "x.py"] and "OMP_NUM_THREADS" in environment
    old, _ = command_line(Mpi("mpirun", "Open MPI", 4), _request("localhost", output_folder="/o"))
    assert "--tag-output --output-filename /o" in " ".join(old) and "-x" not in old
    hydra, _ = command_line(Mpi("mpiexec", "MPICH", 5), _request("localhost", "far.example"))
    assert " ".join(hydra) == "mpiexec -n 4 -hosts localhost:2,far.example:2 -bind-to none python x.py"
    bound, _ = command_line(Mpi("mpiexec", "MPICH", 5), _request("localhost", binding_args="-bind-to core"))
    assert " ".join(bound) == "mpiexec -n 2 -bind-to core python x.py"


def test_a_wish_that_this_mpirun_cannot_serve_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--ssh-port.*ssh/config"):
        command_line(Mpi("mpiexec", "MPICH", 5), _request("localhost", ssh_port=1))
    with pytest.raises(LaunchError, match="--mpi-args"):
        command_line(Mpi("mpirun", "Open MPI", 5), _request("localhost", mpi_args="'"))


def test_no_mpirun_or_a_stranger_is_an_error_with_the_next_move(launch: Any, tmp_path: Path) -> None:
    stranger = tmp_path / "mpirun"
    stranger.write_text("#!/bin/sh\necho odd launcher 1.0\n")
    stranger.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    done = launch([*RUN, "--mpi", "-np", "2", "true"], env=env, check=False)
    assert done.returncode == 2 and "odd launcher 1.0" in done.stderr and "Traceback" not in done.stderr


def test_hydra_gets_whole_lines_unless_the_user_wants_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request = _request("localhost")
    request = request._replace(environment={**request.environment, "PYTHONUNBUFFERED": "1"})
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert "PYTHONUNBUFFERED" not in command_line(Mpi("mpiexec", "MPICH", 5), request)[1]
    assert "PYTHONUNBUFFERED" in command_line(Mpi("mpirun", "Open MPI", 5), request)[1]
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert "PYTHONUNBUFFERED" in command_line(Mpi("mpiexec", "MPICH", 5), request)[1]
