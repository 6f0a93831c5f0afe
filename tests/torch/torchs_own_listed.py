"""Which of torch's own tests differ on horoclone's backend, and why. See torchs_own.py.

A test that torch itself skips where it runs here needs no entry. What is listed must fail: an entry whose test passes is
wrong, and test_torchs_own.py says so.
"""

from __future__ import annotations

_NAME = "the group says that its backend is horoclone, and the test wants the name that it asked for"
_REFUSED = (
    "torch.distributed.monitored_barrier takes gloo only, by name: the barrier is called on the group. Its words are "
    "tested in test_c10d.py"
)
_WORDS = (
    "the test looks for 'Timed out', 'closed' or 'timeout' as words of the error; ours is Timeout and says 'not "
    "complete after 1 s, the time limit given to torch.distributed'. test_c10d.py tests it"
)

# the backend in whose place the group is -> name of the test -> reason
LISTED: dict[str, dict[str, str]] = {
    "gloo": {
        "test_get_backend": _NAME,
        "test_monitored_barrier_gloo": _REFUSED,
        "test_monitored_barrier_gloo_subgroup": _REFUSED,
        "test_barrier_timeout_full_group": _WORDS,
        "test_barrier_timeout_global": _WORDS,
    },
    "mpi": {"test_get_backend": _NAME},
}


def listed(believed: str) -> dict[str, str]:
    """Name -> reason, for the tests that believe in the backend `believed`."""
    return LISTED.get(believed, {})
