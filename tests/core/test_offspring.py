"""Processes that a rank starts import its script again, init() at its top level included, and are no ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import multiprocessing as mp, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import horoclone as hvd

hvd.init()
place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.is_homogeneous()

def work(x):
    return 2 * x, place, hvd.is_initialized()

def communicate(x):
    try:
        hvd.allreduce(np.ones(1), name="of a child")
    except hvd.HorovodInternalError as error:
        return str(error)

if __name__ == "__main__":
    for how in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, mp_context=mp.get_context(how)) as pool:
            assert list(pool.map(work, range(3))) == [(2 * x, place, False) for x in range(3)]
            for text in pool.map(communicate, range(1)):
                assert f"was started by rank {hvd.rank()} " in text and "__name__" in text and "spawn" in text, text
    with mp.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, [4]) == [(8, place, False)]
    with mp.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
    alone = {name: text for name, text in __import__("os").environ.items() if "HORO" not in name}
    line = "import horoclone as h; h.init(); print(h.size(), h.allreduce([1.0], op=h.Sum)[0])"
    assert subprocess.check_output([sys.executable, "-c", line], env=alone, text=True) == "1 1.0\\n"
    line = "import horoclone as h; print(h.rank(), h.size())"  # as a worker whose script calls init() in main() only
    assert subprocess.check_output([sys.executable, "-c", line], text=True) == f"{hvd.rank()} {hvd.size()}\\n"
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2
    print("well", flush=True)
"""


def test_a_started_process_knows_whose_it_is_and_communicates_not(launch: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = launch(
        [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, str(script)], timeout_s=120
    )
    assert done.stdout.count("well") == 2, done.output
