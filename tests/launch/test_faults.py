"""The launcher and the runtime together: what a whole job prints and returns when one rank raises, dies or leaves."""

from __future__ import annotations

import re
import sys

RUN = [sys.executable, "-m", "horoclone.launch", "-np", "3", sys.executable, "-c"]
BODY = """
import os, sys, time
import numpy as np
import horoclone as hvd
hvd.init()
assert hvd.allreduce(np.ones(4), op=hvd.Sum, name="first").tolist() == [3.0] * 4
if hvd.rank() == 1:
    time.sleep(0.2)
    {what}
began = time.monotonic()
try:
    hvd.allreduce(np.ones(4), name="w.3")
finally:
    print("noticed", hvd.rank(), time.monotonic() - began < 10, flush=True)
"""


def _noticed(output: str) -> list[str]:
    return sorted(line.partition("] ")[2] for line in output.splitlines() if "noticed" in line)


def test_an_exception_on_one_rank_is_the_root_cause_and_its_traceback_is_printed_once(launch):
    done = launch([*RUN, BODY.format(what="raise ValueError('bad batch 17')")], check=False)
    report = done.stderr[done.stderr.index("horoclonerun: ") :]
    assert done.returncode == 1 and _noticed(done.stdout) == ["noticed 0 True", "noticed 2 True"], done.output
    assert report.splitlines()[0].endswith("ended with exit code 1")
    assert report.count("ValueError: bad batch 17") == 1
    assert "Traceback" not in report and done.stderr.count("[1] Traceback (most recent call last):") == 1
    assert "ranks 0,2 were stopped because of this." in report
    assert "rank 1 raised ValueError: bad batch 17" in done.stderr  # what the others say


def test_a_rank_that_leaves_early_with_zero_is_named(launch):
    done = launch([*RUN, BODY.format(what="sys.exit(0)")], check=False)
    assert done.returncode == 1, done.output
    assert re.search(
        r"root cause: rank 1 \(.*\) ended with exit code 0 while others still had work", done.stderr
    )


# What a child of this process finds open beyond the three standard streams.
INHERITED = """
import os, subprocess, sys
LIST = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 1000) if os.path.lexists(f'/proc/self/fd/{n}')])"
def inherited():
    return eval(subprocess.run([sys.executable, "-c", LIST], close_fds=False, capture_output=True, text=True).stdout)
"""


def test_children_of_a_rank_inherit_no_descriptor_of_ours(launch):
    body = INHERITED + (
        "import horoclone as hvd\n"
        "hvd.init()\n"
        "print('inherited', hvd.rank(), inherited())\n"
        "hvd.shutdown(); hvd.init(); hvd.shutdown()\n"
    )
    done = launch([*RUN, body], check=False)
    assert done.returncode == 0, done.output
    found = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "inherited" in line)
    assert found == ["inherited 0 []", "inherited 1 []", "inherited 2 []"], done.output


def test_a_function_that_run_started_has_the_runtime_and_its_children_inherit_no_descriptor_of_ours():
    from horoclone.launch.api import run

    def found():
        import numpy as np

        import horoclone as hvd

        hvd.init()
        names: dict[str, object] = {}
        exec(INHERITED, names)
        total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="x").tolist()
        return hvd.rank(), total, [one for one in names["inherited"]() if "horoclone" in one]

    assert run(found, np=2) == [(0, [2.0, 2.0], []), (1, [2.0, 2.0], [])]
