"""The core's lines in Python's logging: where the program has set `horoclone` up, and only there."""

from __future__ import annotations

import sys
from typing import Any

import pytest

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
print("this rank is content", flush=True)
"""
HANDLER = """
class Handler(logging.Handler):
    def emit(self, record):
        # One write, for another thread prints meanwhile: print() writes its arguments one by one.
        told = (record.name, record.levelname, record.rank, record.getMessage())
        sys.stdout.write("RECORD %s %s %s %s\\n" % told)
        sys.stdout.flush()
logger = logging.getLogger("horoclone")
"""


def execute(program: str) -> None:
    exec(program, {"__name__": "__main__"})


def said(worker_pool: Any, program: str, size: int = 2, **env: str) -> str:
    """What ranks print that run this program and end well."""
    team = worker_pool(execute, size, env={**WARNS, **env}, program=program)
    assert team.wait(60) == [0] * size, team.outputs()
    assert size == 1 or team.outputs().count("is content") == 2, team.outputs()
    return str(team.outputs())


IMPORTS = "import logging, os, sys, horoclone as hvd\n"


def alone(worker_pool: Any, program: str) -> str:
    """Of one rank, with horoclone imported as hvd."""
    return said(worker_pool, IMPORTS + HANDLER + program, 1)


def started(launch: Any, program: str, **env: str) -> Any:
    """Of one rank in a process of its own, whose stderr and stdout are apart; a pool's ranks have one file for both."""
    return launch([sys.executable, "-c", program], env={**WARNS, **env}, timeout_s=60)


@pytest.mark.parametrize(
    "set_up", ["", "logging.basicConfig(level=logging.DEBUG, format='LOGGED %(message)s')"]
)
def test_lines_go_to_stderr_where_nobody_has_set_the_logger_up(launch: Any, set_up: str) -> None:
    done = started(launch, PROGRAM.format(set_up=set_up))
    assert done.stderr.count(LINE) == 1 and "LOGGED the timeline" not in done.output, done.output
    assert "[horoclone] [rank 0] warning: " in done.stderr and LINE not in done.stdout, done.output


@pytest.mark.parametrize(
    "set_up",
    [
        "logger.addHandler(Handler()); logger.propagate = False",
        "logging.getLogger().addHandler(Handler()); logger.setLevel(logging.INFO)",
    ],
)
def test_a_logger_that_is_set_up_gets_each_line_once(worker_pool: Any, set_up: str) -> None:
    output = said(worker_pool, PROGRAM.format(set_up=HANDLER + set_up))
    assert output.count(LINE) == 1, output
    assert f"RECORD horoclone WARNING 0 {LINE}" in output
    assert "[horoclone] [rank" not in output


def test_the_loggers_level_is_the_cores_where_no_variable_says_another(worker_pool: Any) -> None:
    set_up = HANDLER + "logger.addHandler(Handler()); logger.setLevel(logging.{})"
    errors_only = said(worker_pool, PROGRAM.format(set_up=set_up.format("ERROR")))
    assert LINE not in errors_only
    by_variable = said(worker_pool, PROGRAM.format(set_up=set_up.format("DEBUG")), HOROVOD_LOG_LEVEL="error")
    assert LINE not in by_variable


def test_a_handler_that_waits_or_raises_holds_up_nothing(worker_pool: Any) -> None:
    waits = HANDLER + (
        "import threading\n"
        "is_over = threading.Event()\n"
        "Handler.emit = lambda self, record: is_over.wait()\n"
        "logger.addHandler(Handler())\n"
    )
    says = {"HOROVOD_NO_SUCH_THING": "1"}  # a remark of Python's, in init()
    said(worker_pool, PROGRAM.format(set_up=waits) + "is_over.set()", **says)
    sets_rank = (
        "plain = logging.getLogRecordFactory()\n"
        "def factory(*given, **more):\n"
        "    record = plain(*given, **more)\n"
        "    record.rank = 'of the program'\n"
        "    return record\n"
        "logging.setLogRecordFactory(factory)\nlogger.addHandler(Handler())\n"
    )
    output = said(worker_pool, PROGRAM.format(set_up=HANDLER + sets_rank))
    assert f"RECORD horoclone WARNING 0 {LINE}" in output, output
    raises = HANDLER + "logger.addFilter(lambda record: 1 / 0)\nlogger.addHandler(Handler())\n"
    said(worker_pool, PROGRAM.format(set_up=raises))


def test_a_handler_may_ask_the_runtime(worker_pool: Any) -> None:
    asks = HANDLER + (
        "def emit(self, record):\n"
        "    import horoclone as hvd\n"
        "    print('ASKED', hvd.is_initialized(), record.getMessage(), flush=True)\n"
        "Handler.emit = emit\n"
        "logger.addHandler(Handler())\n"
    )
    assert "ASKED" in said(worker_pool, PROGRAM.format(set_up=asks))


def test_a_child_forked_after_shutdown_logs_again(launch: Any) -> None:
    program = (
        "logger.addHandler(Handler())\n"
        "hvd.init(); hvd.shutdown()\n"
        "if os.fork():\n"
        "    print('CHILD', os.wait()[1], flush=True)\n"
        "else:\n"
        "    hvd.init(); hvd.shutdown()\n"
    )
    done = started(launch, IMPORTS + HANDLER + program)
    assert done.stdout.count(f"RECORD horoclone WARNING 0 {LINE}") == 2, done.output
    assert "CHILD 0" in done.stdout


def test_a_handler_that_hangs_does_not_hold_the_exit_and_loses_nothing(launch: Any) -> None:
    program = (
        "import threading\n"
        "Handler.emit = lambda self, record: threading.Event().wait()\n"
        "logger.addHandler(Handler())\n"
        "hvd.init()\n"
    )
    done = started(launch, IMPORTS + HANDLER + program, HOROVOD_LOG_LEVEL="debug")
    shown = [line for line in done.stderr.splitlines() if line.startswith("[horoclone] [rank 0] ")]
    assert any(LINE in line for line in shown) and len(shown) > 1, done.output
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("handlers", ["", "'root': {'handlers': []}"])
def test_a_logger_that_is_disabled_leaves_the_lines_to_stderr(launch: Any, handlers: str) -> None:
    done = started(
        launch,
        IMPORTS + HANDLER + "import logging.config\n"
        "logger.addHandler(Handler())\n"
        "before = os.environ.pop('HOROVOD_TIMELINE')\n"
        "hvd.init()\n"
        f"logging.config.dictConfig({{'version': 1, {handlers}}})\n"
        "hvd.shutdown()\n"
        "os.environ['HOROVOD_TIMELINE'] = before\n"
        "hvd.init()\n",
    )
    assert LINE in done.stderr and LINE not in done.stdout, done.output


def test_records_of_python_code_have_a_rank_and_say_the_name_once(worker_pool: Any) -> None:
    output = alone(
        worker_pool,
        "from horoclone import comparison\n"
        "from horoclone.ps import server\n"
        "logger.addHandler(Handler())\n"
        "hvd.init()\n"
        "comparison.log.warning('compared'); server.log.warning('served')\n",
    )
    assert "RECORD horoclone WARNING 0 compared" in output, output
    assert "RECORD horoclone.ps WARNING 0 served" in output, output
