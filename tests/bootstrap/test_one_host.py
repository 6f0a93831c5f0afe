"""The names at which ranks of one host meet, and other users who hold them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from horoclone import errors
from horoclone.bootstrap import one_host
from horoclone.bootstrap.rendezvous import Client, Server

SECRET = b"0123456789abcdef"
# argv: names. Holds each as another user: the first listens and never answers, the others do not even listen.
STRANGER = """
import os, socket, sys
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
held = [socket.socket(socket.AF_UNIX) for name in sys.argv[1:]]
for one, name in zip(held, sys.argv[1:]):
    one.bind("\\0" + name[5:])
held[0].listen()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_a_stranger(names):
    if os.geteuid() != 0:
        pytest.skip("needs root: it becomes another user")
    command = [sys.executable, "-c", STRANGER, *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            stranger.communicate(timeout=30)


def serve(names):
    return one_host.serve(lambda address: Server(b"", "job", 2, [address]), names, time.monotonic() + 30)


def test_names_follow_from_what_the_ranks_share_and_from_the_secret():
    names = one_host.addresses(b"", "job", "world")
    assert len(set(names)) == one_host.NAMES and names == one_host.addresses(b"", "job", "world")
    assert not set(names) & set(one_host.addresses(SECRET, "job", "world"))
    assert not set(names) & set(one_host.addresses(b"", "job", "part"))


def test_rank_0_takes_the_next_name_and_the_others_find_it():
    names = one_host.addresses(b"", secrets.token_hex(8))
    with held_by_a_stranger(names[:3]):
        waiting = Client(names, b"", "job", 0.5)
        with pytest.raises(errors.Timeout, match=r"belongs to user id 65534"):
            waiting.put("early", b"")  # a stranger's socket is no reason to give up: rank 0 may only be late
        server = serve(names)
        try:
            assert server.addresses == [names[3]]
            other = Client(names, b"", "job", 30)
            other.put("key", b"value")
            assert other.get("key", 5) == b"value"
            other.close()
        finally:
            server.close()


def test_a_job_starts_though_another_user_holds_the_first_name(launch, tmp_path):
    port = str(1024 + secrets.randbelow(60000))
    job = f"torchrun:none:127.0.0.1:{port}:0"
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    starter = (
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, '-c', sys.argv[1]], env=os.environ | {'RANK': r, 'LOCAL_RANK': r})\n"
        "         for r in '01']\n"
        "sys.exit(max(one.wait() for one in ranks))\n"
    )
    rank = "import horoclone as hvd; hvd.init(); print(f'met {hvd.size()}\\n', end='', flush=True)"
    from horoclone.bootstrap import exchange

    with held_by_a_stranger(one_host.addresses(b"", job, exchange._scope([0, 1]))[:1]):
        done = launch([sys.executable, "-c", starter, rank], env={**os.environ, **variables})
    assert done.stdout.count("met 2") == 2, done.output


def test_with_all_names_held_the_text_says_by_whom_and_what_helps():
    names = one_host.addresses(b"", secrets.token_hex(8))
    with held_by_a_stranger(names), pytest.raises(errors.HorovodInternalError) as caught:
        serve(names)
    text = str(caught.value)
    assert "user id 65534" in text and "HOROCLONE_SECRET_FILE" in text and "of yours" not in text


def test_a_name_held_by_the_same_user_is_waited_for_and_named(monkeypatch):
    monkeypatch.setattr(one_host, "BIND_PATIENCE_S", 0.3)
    names = one_host.addresses(b"", secrets.token_hex(8))
    older = serve(names)
    with pytest.raises(errors.HorovodInternalError, match="another process of yours holds"):
        serve(names)
    older.close()
    serve(names).close()
