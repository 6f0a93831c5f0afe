"""--dashboard, --metrics-port and `horoclone top` where something is missing or wrong: one line, before the job starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from horoclone.launch.usage import LaunchError
from horoclone.launch.views import LOCAL, NEEDS, check_packages, endpoint

MARK = "a rank has started"
RANK = [sys.executable, "-c", f"print({MARK!r})"]
RUN = [Path(sys.executable).with_name("horoclonerun"), "-np", "1"]


def refused(launch: Any, flags: list[str], env: dict[str, str] | None = None) -> str:
    done = launch([*RUN, *flags, *RANK], check=False, env=env)
    assert done.returncode in (1, 2) and MARK not in done.stdout and "Traceback" not in done.stderr, (
        done.output
    )
    return done.stderr


@pytest.mark.parametrize("flag", ["--metrics-port", "--dashboard-port"])
def test_a_port_that_is_taken_is_said_before_the_job_starts(launch: Any, flag: str) -> None:
    for package in NEEDS[flag.removesuffix("-port") if flag == "--dashboard-port" else flag][0]:
        pytest.importorskip(package)
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(launch, [flag, str(port)])
    assert (
        said
        == f"horoclonerun: {flag}: port {port} of 127.0.0.1 is taken; choose another, or 0 for any that is free\n"
    )


def test_an_address_that_is_not_ours_or_is_no_address(launch: Any) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    assert "cannot listen on 192.0.2.1 port 0" in refused(launch, ["--dashboard-port", "192.0.2.1:0"])
    for text in ("x", "70000", ":80", "127.0.0.1:", "-1"):
        with pytest.raises(LaunchError, match=r"expected PORT or ADDRESS:PORT"):
            endpoint("--metrics-port", text)
    assert endpoint("--metrics-port", "9400") == ("127.0.0.1", 9400)
    assert endpoint("--metrics-port", "[::1]:9400") == ("::1", 9400)


@pytest.mark.parametrize(("flag", "packages"), [(flag, need[0]) for flag, need in NEEDS.items()])
def test_a_missing_package_is_named_with_how_to_install_it(
    flag: str, packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        LaunchError, match=rf"^{flag} needs {packages[0]}.*: pip install {' '.join(packages)}$"
    ):
        check_packages(flag)


def test_the_extras_exist_and_bring_these_packages() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    for packages, extra in NEEDS.values():
        (line,) = (line for line in text.splitlines() if line.startswith(f"{extra} = "))
        assert all(package in line for package in packages)


def test_a_missing_package_stops_the_launcher_before_its_ranks(launch: Any) -> None:
    hide = (
        "import sys; sys.modules['uvicorn'] = None; from horoclone.launch.cli import main; sys.exit(main())"
    )
    done = launch([sys.executable, "-c", hide, "-np", "1", "--dashboard", *RANK], check=False)
    assert done.returncode == 1 and MARK not in done.stdout
    assert done.stderr == "horoclonerun: --dashboard needs uvicorn: pip install uvicorn\n"


def test_mpirun_and_the_dashboard_exclude_each_other(launch: Any) -> None:
    assert "horoclone top" in refused(launch, ["--mpi", "--dashboard"])


def test_a_file_may_set_the_ports(tmp_path: Path) -> None:
    from horoclone.launch.config_file import load

    config = tmp_path / "job.yaml"
    config.write_text("metrics_port: 9400\ndashboard: true\ndashboard_port: 127.0.0.1:8000\n")
    assert load(str(config))[0] == {
        "metrics_port": 9400,
        "dashboard": True,
        "dashboard_port": "127.0.0.1:8000",
    }


def test_top_looks_neither_all_the_time_nor_never(launch: Any) -> None:
    pytest.importorskip("rich")
    done = launch([Path(sys.executable).with_name("horoclone"), "top", "--interval", "0"], check=False)
    assert done.returncode == 2 and "from 0.1 to 3600 seconds" in done.stderr


def test_a_job_of_plain_python_can_be_watched_too(launch: Any) -> None:
    """Its ranks never call init(): the views have nothing to tell but that they run and end."""
    for package in ("prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(package)
    done = launch([*RUN, "--dashboard", "--metrics-port", "0", *RANK])
    assert MARK in done.stdout and "http://127.0.0.1:" in done.stderr and done.seconds < 60
