"""The core's lines in Python's logging: where the program has set `horoclone` up, and only there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

RUN = [Path(sys.executable).with_name("horoclonerun"), "-np", "2", sys.executable]
# Rank 0's core says that it cannot write its timeline.
WARNS = {"HOROVOD_TIMELINE": "/nowhere/timeline.json"}
LINE = "the timeline cannot be written to '/nowhere/timeline.json'"
PROGRAM = """
import logging, os, sys
{set_up}
import numpy as np, horoclone as hvd
hvd.init()
hvd.allreduce(np.ones(3), name="x")
hvd.shutdown()
print("rank", os.environ["HOROVOD_RANK"], "is content")
"""
HANDLER = """
class Handler(logging.Handler):
    def emit(self, record):
        print("RECORD", record.name, record.levelname, record.rank, record.getMessage(), flush=True)
logger = logging.getLogger("horoclone")
"""


@pytest.mark.parametrize(
    "set_up", ["", "logging.basicConfig(level=logging.DEBUG, format='LOGGED %(message)s')"]
)
def test_lines_go_to_stderr_where_nobody_has_set_the_logger_up(launch: Any, set_up: str) -> None:
    done = launch([*RUN, "-c", PROGRAM.format(set_up=set_up)], env=WARNS)
    assert done.output.count(LINE) == 1 and "LOGGED the timeline" not in done.output, done.output
    assert "[horoclone] [rank 0] warning: " in done.stderr


@pytest.mark.parametrize(
    "set_up",
    [
        "logger.addHandler(Handler()); logger.propagate = False",
        pytest.param(
            "logging.getLogger().addHandler(Handler()); logger.setLevel(logging.INFO)",
            marks=pytest.mark.long(5),
        ),
    ],
)
def test_a_logger_that_is_set_up_gets_each_line_once(launch: Any, set_up: str) -> None:
    done = launch([*RUN, "-c", PROGRAM.format(set_up=HANDLER + set_up)], env=WARNS)
    assert done.stdout.count("is content") == 2
    assert done.output.count(LINE) == 1, done.output
    assert f"RECORD horoclone WARNING 0 {LINE}" in done.stdout
    assert "[horoclone] [rank" not in done.output


def test_the_loggers_level_is_the_cores_where_no_variable_says_another(launch: Any) -> None:
    set_up = HANDLER + "logger.addHandler(Handler()); logger.setLevel(logging.{})"
    errors_only = launch([*RUN, "-c", PROGRAM.format(set_up=set_up.format("ERROR"))], env=WARNS)
    assert LINE not in errors_only.output
    env = {**WARNS, "HOROVOD_LOG_LEVEL": "error"}
    by_variable = launch([*RUN, "-c", PROGRAM.format(set_up=set_up.format("DEBUG"))], env=env)
    assert LINE not in by_variable.output


def test_a_handler_that_waits_or_raises_holds_up_nothing(launch: Any) -> None:
    waits = HANDLER + (
        "import threading\n"
        "is_over = threading.Event()\n"
        "Handler.emit = lambda self, record: is_over.wait()\n"
        "logger.addHandler(Handler())\n"
    )
    says = {**WARNS, "HOROVOD_NO_SUCH_THING": "1"}  # a remark of Python's, in init()
    done = launch([*RUN, "-c", PROGRAM.format(set_up=waits) + "is_over.set()"], env=says)
    assert done.stdout.count("is content") == 2, done.output
    sets_rank = (
        "plain = logging.getLogRecordFactory()\n"
        "def factory(*given, **more):\n"
        "    record = plain(*given, **more)\n"
        "    record.rank = 'of the program'\n"
        "    return record\n"
        "logging.setLogRecordFactory(factory)\nlogger.addHandler(Handler())\n"
    )
    done = launch([*RUN, "-c", PROGRAM.format(set_up=HANDLER + sets_rank)], env=WARNS)
    assert f"RECORD horoclone WARNING 0 {LINE}" in done.stdout, done.output
    raises = HANDLER + "logger.addFilter(lambda record: 1 / 0)\nlogger.addHandler(Handler())\n"
    done = launch([*RUN, "-c", PROGRAM.format(set_up=raises)], env=WARNS)
    assert done.stdout.count("is content") == 2, done.output


def test_a_handler_may_ask_the_runtime(launch: Any) -> None:
    asks = HANDLER + (
        "def emit(self, record):\n"
        "    import horoclone as hvd\n"
        "    print('ASKED', hvd.is_initialized(), record.getMessage(), flush=True)\n"
        "Handler.emit = emit\n"
        "logger.addHandler(Handler())\n"
    )
    done = launch([*RUN, "-c", PROGRAM.format(set_up=asks)], env=WARNS)
    assert done.stdout.count("is content") == 2 and "ASKED" in done.stdout, done.output


def alone(launch: Any, program: str, **env: str) -> Any:
    """One rank, without the launcher, with horoclone imported as hvd."""
    start = HANDLER.replace("\n", "\nimport logging, os, sys, horoclone as hvd\n", 1)
    return launch([sys.executable, "-c", start + program], env={**WARNS, **env}, timeout_s=60)


def test_a_child_forked_after_shutdown_logs_again(launch: Any) -> None:
    done = alone(
        launch,
        "logger.addHandler(Handler())\n"
        "hvd.init(); hvd.shutdown()\n"
        "if os.fork():\n"
        "    print('CHILD', os.wait()[1], flush=True)\n"
        "else:\n"
        "    hvd.init(); hvd.shutdown()\n",
    )
    assert done.stdout.count(f"RECORD horoclone WARNING 0 {LINE}") == 2, done.output
    assert "CHILD 0" in done.stdout


def test_a_handler_that_hangs_does_not_hold_the_exit_and_loses_nothing(launch: Any) -> None:
    done = alone(
        launch,
        "import threading\n"
        "Handler.emit = lambda self, record: threading.Event().wait()\n"
        "logger.addHandler(Handler())\n"
        "hvd.init()\n",
        HOROVOD_LOG_LEVEL="debug",
    )
    assert done.returncode == 0, done.output
    shown = [line for line in done.stderr.splitlines() if line.startswith("[horoclone] [rank 0] ")]
    assert any(LINE in line for line in shown) and len(shown) > 1, done.output
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("handlers", ["", "'root': {'handlers': []}"])
def test_a_logger_that_is_disabled_leaves_the_lines_to_stderr(launch: Any, handlers: str) -> None:
    done = alone(
        launch,
        "import logging.config\n"
        "logger.addHandler(Handler())\n"
        "before = os.environ.pop('HOROVOD_TIMELINE')\n"
        "hvd.init()\n"
        f"logging.config.dictConfig({{'version': 1, {handlers}}})\n"
        "hvd.shutdown()\n"
        "os.environ['HOROVOD_TIMELINE'] = before\n"
        "hvd.init()\n",
    )
    assert LINE in done.stderr and LINE not in done.stdout, done.output


def test_records_of_python_code_have_a_rank_and_say_the_name_once(launch: Any) -> None:
    done = alone(
        launch,
        "from horoclone import comparison\n"
        "from horoclone.ps import server\n"
        "logger.addHandler(Handler())\n"
        "hvd.init()\n"
        "comparison.log.warning('compared'); server.log.warning('served')\n",
    )
    assert "RECORD horoclone WARNING 0 compared" in done.stdout, done.output
    assert "RECORD horoclone.ps WARNING 0 served" in done.stdout, done.output
