"""horoclonerun as users type it: flags, quoting, environment, files, what it imports. Ranks are plain Python."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from horoclone.launch import cli, doctor, tool

RUN = [sys.executable, "-m", "horoclone.launch"]
PYTHON = sys.executable


def _ranks(
    launch, tmp_path: Path, flags: list[str], names: list[str], env: dict[str, str] | None = None
) -> list[dict]:
    """Runs ranks that write the named variables to files, and returns them by rank."""
    body = (
        "import json, os, sys\n"
        f"found = {{name: os.environ.get(name) for name in {names!r}}}\n"
        "open(os.path.join(sys.argv[1], os.environ['HOROVOD_RANK']), 'w').write(json.dumps(found))\n"
    )
    out = tmp_path / "found"
    out.mkdir()
    launch([*RUN, *flags, PYTHON, "-c", body, str(out)], env=env)
    return [json.loads((out / str(rank)).read_text()) for rank in range(len(list(out.iterdir())))]


@pytest.fixture
def called(capfd, monkeypatch) -> Callable[..., SimpleNamespace]:
    """called(main, words) calls a command's main() here, which saves the start of an interpreter; gives what it ended with."""
    for name in list(os.environ):
        if name.startswith(("HOROCLONE_", "HOROVOD_")):
            monkeypatch.delenv(name)

    def call(main: Callable[[list[str]], int], words: list[str]) -> SimpleNamespace:
        try:
            code = main(words)
        except SystemExit as end:  # --help
            code = end.code or 0
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err, output=f"{code}\n{out}\n{err}")

    return call


def test_arguments_reach_the_rank_as_they_are(launch):
    nasty = [
        "a b", "it's", '"q"', ";", "$(touch /tmp/x)", "`id`", "*", "", "--", "-np", "\\", "new\nline", "ä"
    ]  # fmt: skip
    done = launch([*RUN, "-np", "1", PYTHON, "-c", "import sys; print(repr(sys.argv[1:]))", *nasty])
    assert done.stdout == f"[0] {nasty!r}\n"


def test_a_double_dash_ends_the_launchers_own_flags(launch):
    done = launch(
        [*RUN, "-np", "1", "--", PYTHON, "-c", "import sys; print(sys.argv[1:])", "--", "--verbose"]
    )
    assert done.stdout == "[0] ['--', '--verbose']\n"


def test_the_secret_is_in_inherited_memory_and_nowhere_else(launch, tmp_path):
    body = (
        "import os, sys\n"
        "fd = int(os.environ['HOROCLONE_SECRET_FD'])\n"
        "secret = os.pread(fd, 100, 0); again = os.pread(fd, 100, 0)\n"
        "assert secret == again and len(secret) == 32, secret\n"
        "try: os.pwrite(fd, b'x', 0); print('writable')\n"
        "except OSError: pass\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    for name in ('environ', 'cmdline'):\n"
        "        held = open(f'/proc/{pid}/{name}', 'rb').read()\n"
        "        assert secret not in held and secret.hex().encode() not in held, name\n"
        "print(secret.hex())\n"
    )
    done = launch([*RUN, "-np", "2", PYTHON, "-c", body])
    assert len({line.split()[1] for line in done.stdout.splitlines()}) == 1 and "writable" not in done.stdout


def test_the_rendezvous_of_a_local_job_listens_on_loopback_only(launch, tmp_path):
    names = ["HOROCLONE_RENDEZVOUS", "HOROCLONE_JOB", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME"]
    found = _ranks(launch, tmp_path, ["-np", "2"], names)
    assert found[0] == found[1] and len(found[0]["HOROCLONE_JOB"]) >= 16
    assert (found[0]["HOROVOD_CROSS_SIZE"], found[0]["HOROVOD_HOSTNAME"]) == ("1", "localhost")
    meeting = found[0]["HOROCLONE_RENDEZVOUS"]
    assert meeting.startswith("127.0.0.1:") and "," not in meeting


def test_horovodruns_flags_become_variables(launch, tmp_path):
    flags = {
        "--fusion-threshold-mb 32": ("HOROVOD_FUSION_THRESHOLD", str(32 << 20)),
        "--cycle-time-ms 2.5": ("HOROVOD_CYCLE_TIME", "2.5"),
        "--no-hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
        "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
        "--stall-check-shutdown-time-seconds 9": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "9"),
        "--log-hide-timestamp": ("HOROVOD_LOG_HIDE_TIME", "1"),  # its twin is in the table of the next test
        "--log-level DEBUG": ("HOROVOD_LOG_LEVEL", "DEBUG"),
        "--start-timeout 77": ("HOROVOD_START_TIMEOUT", "77"),
        "--network-interface lo": ("HOROVOD_GLOO_IFACE", "lo"),
        "--tcp": ("NCCL_IB_DISABLE", "1"),
        "--gloo --disable-cache --autotune": ("HOROVOD_AUTOTUNE", "1"),
    }
    words = [word for flag in flags for word in flag.split()] + ["--timeline-filename", "/x y"]
    expected = {**dict(flags.values()), "HOROVOD_TIMELINE": "/x y"}
    assert _ranks(launch, tmp_path, ["-np", "1", *words], list(expected)) == [expected]


def test_every_tunable_reaches_every_rank_from_flags_and_from_a_file_in_horovods_sections(launch, tmp_path):
    """Each flag of the table with a value of its own; the file says the same by section and key."""
    yaml = pytest.importorskip("yaml")
    from horoclone.launch.options import SETTINGS, variable_text

    special = {"log-level": "INFO", "timeline-filename": str(tmp_path / "t"), "autotune-log-file": str(tmp_path / "a"),
               "thread-affinity": "0,1"}  # fmt: skip
    flags, sections, expected = [], {}, {}
    for number, setting in enumerate(SETTINGS, 1):
        value = special.get(setting.flag, True if setting.kind is bool else number)
        flags += [f"--{setting.flag}"] if setting.kind is bool else [f"--{setting.flag}", str(value)]
        section, _, key = setting.place.partition(".")
        sections.setdefault(section, {})[key] = value
        expected[setting.variable] = variable_text(
            setting, setting.kind(str(value)) if value is not True else True
        )
    assert len(expected) == len(SETTINGS) >= 22
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(sections))
    for folder in ("flags", "file", "off"):
        (tmp_path / folder).mkdir()
    for folder, given in (("flags", flags), ("file", ["--config-file", str(file)])):
        assert _ranks(launch, tmp_path / folder, ["-np", "2", *given], list(expected)) == [expected] * 2
    off = [f"--{one.off_flag or 'no-' + one.flag}" for one in SETTINGS if one.kind is bool]
    turned = {one.variable: variable_text(one, False) for one in SETTINGS if one.kind is bool}
    assert _ranks(launch, tmp_path / "off", ["-np", "1", *off], list(turned)) == [turned]


def test_flags_change_what_the_runtime_does_not_only_variables(launch, tmp_path):
    """Seen from inside: the runtime itself has read them."""
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    body = (
        "import json, time, numpy as np, horoclone as hvd; from horoclone import runtime; hvd.init(); t = time.monotonic()\n"
        "hvd.synchronize(hvd.allreduce_async(np.ones(1), name='a')); took = time.monotonic() - t\n"
        "print(took > 0.25, flush=True); hvd.barrier(); error = None\n"
        "try: hvd.allreduce(np.ones(1), name=f'only {hvd.rank()}')\n"
        "except hvd.HorovodInternalError as e: error = str(e)\n"
        "print('STALL_SHUTDOWN' in error, flush=True)\n"
    )
    flags = ["--cycle-time-ms", "300", "--stall-check-warning-time-seconds", "1",
             "--stall-check-shutdown-time-seconds", "2", "--log-without-timestamp"]  # fmt: skip
    done = launch([*RUN, "-np", "2", *flags, PYTHON, "-c", body], timeout_s=60)
    assert sorted(done.stdout.split()) == ["True"] * 4 + ["[0]"] * 2 + ["[1]"] * 2, done.output
    assert "[0] [horoclone] [rank 0] warning: One or more tensors" in done.stderr, done.output


def test_the_programmatic_twin_takes_all_of_horovods_arguments_in_its_order():
    import inspect

    from horoclone import run

    names = """func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
        host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo
        use_mpi mpi_args network_interface network_interfaces executable np min_np max_np""".split()  # noqa: SIM905
    signature = inspect.signature(run)
    assert list(signature.parameters)[: len(names)] == names
    given = {one: signature.parameters[one].default for one in names[1:]}
    assert given.pop("args") == () and set(given.values()) <= {None, 1}


def test_flag_beats_environment_beats_file(launch, tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(
        "params:\n  cycle_time_ms: 1\n  cache_capacity: 1\n  fusion_threshold_mb: 1\n"
        "stall_check:\n  enabled: false\nlogging:\n  hide_timestamp: true\nnum-proc: 2\n"
    )
    names = ["HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_STALL_CHECK_DISABLE",
             "HOROVOD_LOG_HIDE_TIME"]  # fmt: skip
    environment = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_CACHE_CAPACITY": "2"}
    found = _ranks(launch, tmp_path, ["--config-file", str(file), "--cycle-time-ms", "3"], names, environment)
    assert [list(one.values()) for one in found] == [["3.0", "2", str(1 << 20), "1", "1"]] * 2
    flags = ["--config-file", str(file), "--cycle-time-ms", "3", "--print-config"]
    lines = [line.split() for line in launch([*RUN, *flags], env=environment).stdout.splitlines()]
    assert ["num_proc", "2", "file"] in lines
    assert ["HOROVOD_CYCLE_TIME", "3.0", "--cycle-time-ms"] in lines
    assert ["HOROVOD_CACHE_CAPACITY", "2", "environment", "(HOROVOD_CACHE_CAPACITY)"] in lines
    assert ["HOROVOD_STALL_CHECK_DISABLE", "1", "file", "(stall_check.enabled)"] in lines
    assert ["HOROVOD_TIMELINE", "default", "of", "the", "runtime"] in lines


@pytest.mark.parametrize("text, said", [
    ("params:\n  cycle_time_m: 1\n", "did you mean params.cycle_time_ms"),
    ("params:\n  cache_capacity: soon\n", "params.cache_capacity"),
    ("autotune:\n  enabled: 1\n", "expected true or false"),
    ("num_proc: true\n", "num_proc: expected"),
    ("elastic:\n  min_np: two\n", "elastic.min_np: expected int"),
    ("elastic:\n  min_n: 2\n", "did you mean elastic.min_np"),
    ("elastic:\n  blacklist_cooldown_range: 3\n", "expected [min, max]"),
    ("controller: jsrun\n", "gloo or mpi"),
    ("- a\n- b\n", "expected 'section:'"),
    ("a: [\n", "is not YAML"),
])  # fmt: skip
def test_a_wrong_config_file_is_explained_without_a_traceback(called, tmp_path, text, said):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    done = called(cli.main, ["-np", "1", "--config-file", str(file), "true"])
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_nproc_per_node_is_not_for_the_hosts_of_a_file(called, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "config.yaml").write_text("hosts: node1:2,node2:2\nnum_proc: 4\n")
    words = ["--nproc-per-node", "2", "--config-file", str(tmp_path / "config.yaml"), "true"]
    done = called(cli.main, words)
    assert done.returncode == 2 and "-H node1:4,node2:4" in done.stderr, done.output


def test_a_script_may_be_on_the_discovered_hosts_only(called):
    words = ["-np", "1", "--host-discovery-script", "false", "python", "/only/there/train.py"]
    done = called(cli.main, words)
    assert done.returncode == 1 and "exit code 1" in done.stderr, done.output  # of the discovery


@pytest.mark.parametrize("flags, code, said", [
    (["-np", "2", "--jsrun", "true"], 2, "LSF"),
    (["-np", "2", "--mpi", "--gloo", "true"], 2, "two different things"),
    (["-np", "2", "--mpi", "--ranks", "0", "true"], 2, "--output-filename"),
    (["--min-np", "3", "-np", "2", "true"], 2, "--min-np 3 <= -np 2"),
    (["--max-np", "1", "-np", "2", "true"], 2, "-np 2 <= --max-np 1"),
    (["--min-np", "2", "-np", "2", "--blacklist-cooldown-range", "0", "2", "true"], 2, "at least 1"),
    (["--min-np", "2", "-np", "2", "--blacklist-cooldown-range", "9", "2", "true"], 2, "must not be larger"),
    (["--min-np", "2", "-np", "2", "--blacklist-cooldown-range", "1", "4000", "true"], 2, "at most 3600"),
    (["-np", "2", "--reset-limit", "3", "true"], 2, "--min-np N makes the job elastic"),
    (["--host-discovery-script", "/no/such", "true"], 2, "how many ranks"),
    (["-np", "1", "--host-discovery-script", "/no/such", "true"], 1, "/no/such: No such file"),
    (["-np", "1", "--host-discovery-script", "false", "true"], 1, "exit code 1"),
    (["-np", "2", "--min-np", "1", "--host-discovery-script", "false", "true"], 1, "exit code 1"),
    (["-np", "1", "--host-discovery-script", "echo h", "true"], 1, "--slots-per-host"),
    (["-np", "1", "--host-discovery-script", "echo '<html>502 Bad Gateway'", "true"], 2, "'<html>502' is not a host name"),
    (["-np", "3", "--min-np", "3", "-H", "localhost:2", "true"], 2, "the hosts have 2"),
    (["-np", "2", "--min-np", "1", "-H", "a:2", "--host-discovery-script", "x", "true"], 2, "give one of them"),
    (["-np", "2", "--min-np", "2", "--mpi", "true"], 2, "goes without --mpi"),
    (["true"], 2, "-np N"),
    (["python", "-c", "x", "-np", "2"], 2, "belongs to it, -np too: horoclonerun -np 2 python -c ..."),
    (["-np", "0", "true"], 2, "whole number from 1"),
    (["-np", "2"], 2, "nothing to run"),
    (["-np", "3", "-H", "localhost:2", "true"], 2, "needs 3 slots"),
    (["-np", "1", "-H", "localhost", "--hostfile", "x", "true"], 2, "one of them"),
    (["-np", "1", "--hostfile", "/no/such/file", "true"], 2, "No such file"),
    (["-np", "1", "--frobnicate", "true"], 2, "--frobnicate"),
    (["-np", "1", "--cache-capacity", "-1", "true"], 2, "at least 0"),
    (["-np", "2", "--ranks", "5", "true"], 2, "only ranks 0-1"),
    (["-np", "2", "no-such-command"], 127, "no such command"),
    (["-np", "2", "--hosst", "a:2", "true"], 2, "did you mean --host?"),
    (["-np", "2", "--fusion-treshold-mb=64", "true"], 2, "did you mean --fusion-threshold-mb?"),
    (["-np", "2", "sleeep", "1"], 127, "did you mean sleep?"),
    (["-np", "2", "/etc/passwd"], 126, "not executable"),
    (["-np", "2", "/etc"], 126, "a folder"),
    (["-np", "1", "--output-filename", "/proc/none", "true"], 2, "/proc/none"),
])  # fmt: skip
def test_user_errors_are_one_message_and_never_a_traceback(called, flags, code, said):
    done = called(cli.main, flags)
    assert done.returncode == code and said in done.stderr, done.output
    assert "Traceback" not in done.stderr and done.stderr.startswith("horoclonerun: ")


def test_a_script_without_its_ending_is_meant_before_a_program_on_path(called, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sleeep.py").touch()
    assert "did you mean python sleeep.py?" in called(cli.main, ["-np", "1", "sleeep"]).stderr


def test_a_script_without_an_interpreter_is_told_from_one_that_is_not_executable(called, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("echo $HOROVOD_RANK\n")
    script.chmod(0o755)
    said = called(cli.main, ["-np", "1", str(script)]).stderr
    assert f"nor a script that begins with #! (sh {script}?)" in said and "not executable" not in said


@pytest.mark.parametrize("text", ["soon", "nan", "-5", "inf"])
def test_a_start_timeout_of_the_environment_is_checked_before_a_rank_starts(called, monkeypatch, text):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", text)
    done = called(cli.main, ["-np", "1", "no-such-command"])
    assert done.returncode == 2 and f"START_TIMEOUT={text!r} is not a positive number" in done.stderr, (
        done.output
    )


def test_output_files_hold_every_ranks_raw_bytes(launch, tmp_path):
    body = (
        "import os, sys\n"
        "r = os.environ['HOROVOD_RANK']\n"
        "os.write(1, b'out ' + r.encode() + b'\\xff\\n'); os.write(2, b'err ' + r.encode())\n"
    )
    done = launch([*RUN, "-np", "11", "--output-filename", tmp_path / "logs", PYTHON, "-c", body])
    for rank in range(11):
        folder = tmp_path / "logs" / f"rank.{rank:02d}"
        assert (folder / "stdout").read_bytes() == f"out {rank}".encode() + b"\xff\n"
        assert (folder / "stderr").read_bytes() == f"err {rank}".encode()
        assert f"[{rank}] out {rank}\N{REPLACEMENT CHARACTER}" in done.stdout.splitlines()
        assert f"[{rank}] err {rank}" in done.stderr.splitlines()


def test_rank_zero_reads_our_stdin_and_the_others_read_nothing(launch, tmp_path):
    typed = tmp_path / "typed"
    typed.write_text("hello\n")
    with typed.open() as stdin:
        body = (
            "import os, sys; print(repr(input() if os.environ['HOROVOD_RANK'] == '0' else sys.stdin.read()))"
        )
        started = launch.start([*RUN, "-np", "2", PYTHON, "-c", body], stdin=stdin)
        done = started.finish(30)
    assert sorted(done.stdout.splitlines()) == ["[0] 'hello'", "[1] ''"]


def test_check_build_says_what_is_missing_and_how_to_get_it(launch):
    text = launch([*RUN, "--check-build"]).stdout
    assert text.startswith("horoclone v")
    for title in ("Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"):
        assert title in text
    rows = [line for line in text.splitlines() if line.startswith("    [")]
    assert len(rows) >= 10
    assert all(len(row.split("]", 1)[1].split(None, 1)) == 2 for row in rows if "[ ]" in row), (
        "an empty box without a reason"
    )
    data = next(line for line in rows if "MPI " in line and line in text[text.index("Tensor Operations") :])
    if importlib.util.find_spec("mpi4py"):
        assert data.startswith("    [X] MPI") and "HOROVOD_CPU_OPERATIONS=mpi" in data, "MPI does move data"
    assert "moves no data" not in text
    if "[X] CUDA" not in text:
        assert "nvidia-nccl" not in text and "pip install cupy" not in text, "of no use here"


def test_check_build_imports_no_framework(launch):
    probe = (
        "import sys\n"
        "from horoclone.launch.cli import main\n"
        "assert main(['--check-build']) == 0\n"
        "print(sorted({'torch', 'tensorflow', 'jax', 'keras'} & set(sys.modules)))\n"
    )
    assert launch([PYTHON, "-c", probe]).stdout.endswith("\n[]\n")


def test_version_is_the_packages(launch):
    import horoclone

    assert launch([*RUN, "--version"]).stdout.strip() == horoclone.__version__
    assert (
        launch([PYTHON, "-m", "horoclone.launch.tool", "--version"]).stdout.strip() == horoclone.__version__
    )


def test_the_doctor_answers_in_json_and_names_the_launcher(launch):
    done = launch([PYTHON, "-m", "horoclone.launch.tool", "doctor", "--json"], check=False)
    answer = json.loads(done.stdout)
    topics = {finding["topic"]: finding for finding in answer["findings"]}
    for topic in (
        "python", "native module", "launcher", "mpi", "shared memory", "memlock", "cores", "interfaces",
        "ssh", "NCCL", "GPU kernels", "PyTorch"
    ):  # fmt: skip
        assert topic in topics, topic
    assert "single" in topics["launcher"]["text"]
    assert (
        (done.returncode == 0)
        == answer["healthy"]
        == all(one["status"] != "bad" for one in answer["findings"])
    )
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
             "SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "4",
             "SLURM_STEP_TASKS_PER_NODE": "4", "HOROCLONE_FAILPOINTS": "init.wait=kill"}  # fmt: skip
    text = launch([PYTHON, "-m", "horoclone.launch.tool", "doctor"], env=slurm, check=False).stdout
    assert "slurm" in text.lower() and "jobs fail" in text
    assert all(character.isprintable() for character in text if character != "\n")


def test_the_doctor_sees_a_launcher_and_a_library_of_different_mpis():
    from horoclone.launch.mpirun import mpi_family

    assert mpi_family("mpirun (Open MPI) 5.0.11") == "Open MPI" == mpi_family("Open MPI v5.0.11, package: x")
    assert (
        mpi_family("HYDRA build details:\n Version: 5.0.2")
        == "MPICH"
        == mpi_family("MPICH Version:      5.0.2")
    )
    assert mpi_family("Intel(R) MPI Library for Linux* OS") == "Intel MPI" and mpi_family("?") == ""


def test_the_tool_command_runs_jobs_and_explains_itself(launch):
    tool = [PYTHON, "-m", "horoclone.launch.tool"]
    assert launch([*tool, "run", "-np", "1", PYTHON, "-c", "print('hi')"]).stdout == "[0] hi\n"
    done = launch([*tool, "clean"], check=False)
    assert done.returncode == 2 and "usage:" in done.stderr


@pytest.mark.parametrize(
    "command", ["run", "leave", "doctor", "debug", "timeline", "simulate", "sockets", "plan", "check-build"]
)
def test_every_subcommand_has_help_of_its_own(called, command):
    assert command in called(tool.main, ["--help"]).stdout
    text = called(tool.main, [command, "--help"]).stdout
    assert text.startswith(f"usage: horoclone {command}") and "-h, --help" in text


@pytest.mark.parametrize("words, said", [
    (["docter"], "did you mean doctor?"),
    (["doctor", "--jsn"], "did you mean --json?"),
    (["leave", "--wiat", "3"], "did you mean --wait?"),
    (["timeline", "out.json"], "required: FILE"),
    ([], "required: COMMAND"),
    (["--verbose", "run"], "unrecognized arguments: --verbose"),
])  # fmt: skip
def test_a_misspelt_command_is_answered_with_what_was_meant(called, words, said):
    done = called(tool.main, words)
    assert done.returncode == 2 and done.stderr.startswith("horoclone: "), done.output
    assert said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("main, words, usage, default", [
    (cli.main, [], "horoclonerun -np N [-H host:slots,...] [flags] python train.py ...",
     "(HOROVOD_FUSION_THRESHOLD; default 128)"),
    (tool.main, [], "horoclone [-h] [-v] COMMAND ...", "commands:"),
    (tool.main, ["simulate"], "horoclone simulate [-h] [--ranks N,...]", "network: --link-gbit GBIT of a node, each "
     "way, in Gbit/s (default 100)"),
    (tool.main, ["sockets"], "horoclone sockets [-h] [--ranks N,...]", "(default 65536,1048576,16777216)"),
])  # fmt: skip
def test_help_begins_with_three_examples_and_names_defaults(called, main, words, usage, default):
    text = called(main, [*words, "--help"]).stdout
    above, _, below = text.partition("\nexamples:\n")
    assert above.startswith(f"usage: {usage}") and "\n\n" not in above
    assert len(below.partition("\n\n")[0].splitlines()) == 3
    assert default in " ".join(text.split())


@pytest.mark.parametrize("words, said", [
    (["--nnodes", "2", "x"], "flag of torchrun: this launcher is started once"),
    (["--nproc_per_node", "2", "-H", "a:2", "x"], "-H node1:4,node2:4"),
    (["--nproc-per-node", "2", "--host-discovery-script", "d", "x"], "-H node1:4,node2:4"),
    (["-np", "4", "--nproc-per-node", "2", "true"], "-np 4 and --nproc-per-node 2"),
    (["--max-restarts=3", "x"], "--min-np 2"),
    (["--rdzv-endpoint", "node1:29500", "x"], "flag of torchrun: this launcher is started once"),
    (["-t", "3", "x"], "-t is a flag of torchrun: --output-filename"),
    (["-r", "3", "x"], "-r is a flag of torchrun: --output-filename"),
    (["--role", "trainer", "x"], "leave it out"),
    (["--local_addr", "10.0.0.1", "x"], "--network-interfaces"),
    (["--monitor-interval", "1", "x"], "leave it out"),
    (["-np", "2", "-m", "train"], "python -m MODULE"),
    (["-np", "2", "python", "no_such.py"], "there is no 'no_such.py'"),
    (["-np", "2", "no_such.py"], "there is no 'no_such.py'"),
    (["-np", "2", "--log-level", "loud", "true"], "'loud' is none of trace, debug"),
    (["-np", "2", "--grace", "x", "true"], "'x' is not a number"),
    (["-np", "2", "--cache-capacity", "-", "true"], "'-' is not a whole number"),
])  # fmt: skip
def test_habits_of_torchrun_and_wrong_values_are_answered_with_what_to_write(called, words, said):
    done = called(cli.main, words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.output, done.output


def test_a_script_written_for_torchrun_runs_as_it_is(launch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, socket\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR'.split()\n"
        "if os.environ['RANK'] == '0': socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
        "print(*(os.environ[name] for name in names))\n"
    )
    stale = {"RANK": "7", "TORCHELASTIC_RUN_ID": "x"}
    script.chmod(0o755)  # without #! in it
    harmless = ["--max-restarts=0", "--node_rank=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [*RUN, "--standalone", "--nnodes=1:1", *harmless, "--nproc-per-node=2", str(script)]
    done = launch(command, env=stale)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0 2 2 0 127.0.0.1", "[1] 1 1 2 2 0 127.0.0.1"]


@pytest.mark.parametrize("words, said", [
    (["simulate", "--ranks", "a"], "'a' is not a list of whole numbers"),
    (["sockets", "--sizes", "4,x"], "'4,x' is not a list of whole numbers"),
    (["simulate", "--plot", "/no/such/x.svg"], "/no/such" if importlib.util.find_spec("matplotlib") else "matplotlib"),
    (["simulate", "--ranks", "2", "--json", "/no/such/x"], "/no/such/x: No such file"),
    (["simulate", "--costs", "/no/such"], "horoclone simulate: /no/such: No such file"),
    (["top", "--interval", "a"], "'a' is not a number"),
    (["debug", "/no/such"], "/no/such: No such file"),
    (["debug", __file__], "is not a flight record (horoclone-rank*.json)"),
    (["timeline", "out.json", __file__], "is not a timeline"),
])  # fmt: skip
def test_what_a_subcommand_cannot_use_is_said_in_words(called, words, said):
    done = called(tool.main, words)
    assert done.returncode == 2 and said in done.stderr and "Error(" not in done.output, done.output


def test_the_doctor_says_why_no_gpu_is_visible_and_ends_with_a_verdict(called, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = called(tool.main, ["doctor"])
    assert re.search(r"^note  GPU +none visible.*: CUDA_VISIBLE_DEVICES='' hides all$", done.stdout, re.M)
    assert not re.search(r"^\w+ +(CUDA|NCCL|GPU kernels|memlock|algorithms|measured)\b", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].startswith("jobs c" if done.returncode == 0 else "jobs would fail: ")
    assert "{" not in done.stdout


def test_a_path_is_not_cut_where_the_terminal_is_narrow(capsys, monkeypatch):
    path = "/" + "long" * 30 + "/libmpi.so"
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("mpi", doctor.OK, f"found at {path}")])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    doctor.main(as_json=False)
    assert path in capsys.readouterr().out


def test_a_shell_is_given_the_flags(launch, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "out"
    env = {"_ARGCOMPLETE": "1", "COMP_LINE": "horoclonerun --hostf", "COMP_POINT": "20"}
    launch(RUN, env={**env, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)})
    assert out.read_text().strip() == "--hostfile"
