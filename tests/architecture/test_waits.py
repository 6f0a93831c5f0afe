"""Every wait has a deadline or an end that somebody brings: those without a number of seconds are listed, with the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = {
    "wait",
    "join",
    "get",
    "result",
    "communicate",
    "acquire",
}  # where they are called without an argument

ACTOR = "it is up, and Ray tells when it is lost"
KILLED = "it has just been killed"
THERE = "what is asked for is there already"
SAVE = "a save has a deadline"
OPERATION = "an operation, which ends or raises"
IDLE = "a thread without work: who brings some, or ends it, wakes it"
# "file function" -> who ends the wait
PYTHON = {
    "live/otlp.py _run": "a daemon thread; shutdown() or the exit says that the rank has ended",
    "membership/failover.py ask_all": "each thread answers, whatever it meets; what it asks has a deadline",
    "checkpoint/__init__.py save": SAVE,
    "checkpoint/__init__.py wait": SAVE,
    "connection_limits.py shutdown": "serve_forever() looks twice a second whether it is to end",
    "elastic/disk.py save": SAVE,
    "elastic/disk.py wait": SAVE,
    "elastic/run.py wrapper": SAVE,
    "arrays/handles.py synchronize": OPERATION,
    "handles.py once": OPERATION,
    "torch/operations/handles.py _synchronize_slowly": OPERATION,
    "jax/call.py is_tracing": "the thread only asks JAX for a value",
    "jax/finishing.py _wait": "programs whose operations end or raise",
    "jax/native.py check": "the self-test calls nobody else",
    "launch/discovery.py run": KILLED,
    "launch/discovery.py take": THERE,
    "launch/host_identity.py take": THERE,
    "launch/link.py close": KILLED,
    "launch/mpirun.py _end": KILLED,
    "launch/mpirun.py call": "the job itself",
    "launch/notice_script.py _stop": KILLED,
    "launch/process.py _wait_or_kill": KILLED,
    "live/dashboard/server.py _keep_looking": "asyncio.wait_for() around it has the limit",
    "live/dashboard/server.py _stream": "the next look at the job; the server's end cancels it",
    "ps/__main__.py main": "the service itself: a signal ends it",
    "ps/register.py _work": IDLE,
    "ray/calls.py _value": THERE,
    "ray/calls.py look": ACTOR,
    "ray/elastic_job.py _end_of": THERE,
    "ray/elastic_job.py _is_up": THERE,
    "ray/in_cluster.py _ask": "what the user's program asks for; Ray tells when the actor is lost",
    "ray/in_cluster.py shutdown": ACTOR,
    "ray/parameter_servers.py where": THERE,
    "ray/strategy.py _wait_for": THERE,
    "ray/strategy.py answers": THERE,
    "ray/train.py _tell": ACTOR,
    "ray/strategy.py create_placement_group": THERE,
    "ray/utils.py map_blocking": "the caller's own references",
    "runtime/member.py _announce": IDLE,
    "spark/executor.py _wait": KILLED,
    "spark/executor.py _word": "select() before it has the limit",
    "spark/executor.py serve_partition": THERE,
    "spark/task_server.py _take": "nothing is read from it but its end, which a selector sees",
    "torch/c10d/group.py barrier": OPERATION,
    "torch/c10d/work.py _next": IDLE,
    "torch/c10d/work.py _settle_now": "another thread, which has its result, is about to set it",
    "torch/c10d/work.py finish_collectives": OPERATION,
    "torch/c10d/work.py get_future": OPERATION,
    "torch/c10d/work.py result": OPERATION,
    "torch/c10d/work.py synchronize": OPERATION,
    "torch/c10d/work.py wait_no_longer": "it has failed, or its time limit is over",
    "torch/torchcomms.py _end": OPERATION,
    "torch/torchcomms.py wait": OPERATION,
    "plan/torch/running.py _way": OPERATION,
    "ps/torch.py _rows": "a request to a server, whose silence has a limit",
}
# "file" -> who ends the wait
NATIVE = {
    "base/log.cc": "the end of the process, or a line, ends it; the thread that waits is a daemon",
    "base/mutex.h": "whoever calls this form of wait() is named here",
    "collective/gpu/nccl_comm.cc": IDLE,
    "engine/record/timeline.cc": IDLE,
    "engine/threads/notifier.h": IDLE,
    "frameworks/jax_gpu.cc": OPERATION,
    "python/without_gil.h": "the end of the process ends the thread",
    "server/server.cc": "waits for connections, and stop() wakes it",
}


# module -> its functions that wait for as long as it takes where no argument says `timeout`
OF_MODULES = {
    "subprocess": {"run", "call", "check_call", "check_output"},
    "ray": {"get", "wait"},
    "socket": {"create_connection"},
    "request": {"urlopen"},
    "futures": {"wait", "as_completed"},
}


def has_no_limit(call: ast.Call) -> bool:
    """By another sign than that there is no argument at all."""
    assert isinstance(call.func, ast.Attribute)
    nothing = [isinstance(one, ast.Constant) and one.value is None for one in call.args]
    limits = [one for one in call.keywords if one.arg == "timeout"]
    if any(isinstance(one.value, ast.Constant) and one.value.value is None for one in limits):
        return True
    module = getattr(call.func.value, "id", getattr(call.func.value, "attr", ""))
    if call.func.attr in OF_MODULES.get(module, ()):
        return not limits and not (module in ("socket", "request") and len(call.args) > 1)
    return call.func.attr in {"settimeout", "wait", "join", "poll"} and nothing == [True]


def waits_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, arguments = node.func.attr, len(node.args) + len(node.keywords)
        select = isinstance(node.func.value, ast.Name) and node.func.value.id == "select"
        if (
            (name in BLOCKS and not arguments)
            or (name == "wait_for" and arguments < 2)
            or (name == "select" and select and arguments < 4)
            or has_no_limit(node)
        ):
            inside = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            yield max(inside, key=lambda one: one.lineno).name if inside else "-"


def test_each_python_wait_without_a_time_limit_says_who_ends_it() -> None:
    found = {
        f"{path.relative_to(ROOT / 'horoclone').as_posix()} {function}"
        for path in (ROOT / "horoclone").rglob("*.py")
        for function in waits_in(path)
    }
    assert sorted(found) == sorted(PYTHON), sorted(found.symmetric_difference(PYTHON))


def test_each_native_wait_without_a_time_limit_says_who_ends_it() -> None:
    endless = re.compile(r"\w+_?\.wait\((?:lock|mu)|::poll\([^;]*, -1\)|::pause\(\)|[ (]pause\(\);")
    found = {
        path.relative_to(ROOT / "csrc").as_posix()
        for path in (ROOT / "csrc").rglob("*.[ch]*")
        if path.relative_to(ROOT / "csrc").parts[0] != "tests" and endless.search(path.read_text())
    }
    assert sorted(found) == sorted(NATIVE), sorted(found.symmetric_difference(NATIVE))
