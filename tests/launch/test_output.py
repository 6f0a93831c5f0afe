"""The ranks' output: whole lines, prefixes, partial lines, odd bytes, progress bars, a real terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from world import load

from horoclone.launch import output, report

on = load(Path(__file__).resolve().parents[1] / "live" / "terminal.py", "terminal")
RUN = [sys.executable, "-m", "horoclone.launch"]
PYTHON = sys.executable
RANK = "import os, sys, time\nr = int(os.environ['HOROVOD_RANK'])\n"


def test_lines_of_many_ranks_never_mix_and_keep_their_order(launch):
    body = RANK + (
        "for i in range(300):\n"
        "    os.write(1, f'{r} {i} '.encode()); os.write(1, b'x' * 500); os.write(1, b' end\\n')\n"
    )
    done = launch([*RUN, "-np", "4", PYTHON, "-c", body])
    seen = {str(rank): [] for rank in range(4)}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"\[(\d)\] (\d) (\d+) x{500} end", line)
        assert match and match[1] == match[2], line
        seen[match[1]].append(int(match[3]))
    assert all(numbers == list(range(300)) for numbers in seen.values())


def test_streams_stay_apart_and_the_last_line_needs_no_newline(launch):
    body = RANK + "os.write(1, b'out\\npartial out'); os.write(2, b'err\\npartial err')"
    done = launch([*RUN, "-np", "1", PYTHON, "-c", body])
    assert done.stdout == "[0] out\n[0] partial out\n" and done.stderr == "[0] err\n[0] partial err\n"


def test_horovods_prefix_is_exact(launch):
    body = RANK + "print('a b'); print('c', file=sys.stderr)"
    done = launch([*RUN, "-np", "1", "--horovod-format", PYTHON, "-c", body])
    assert (done.stdout, done.stderr) == ("[0]<stdout>:a b\n", "[0]<stderr>:c\n")
    done = launch([*RUN, "-np", "1", "--horovod-format", "-prefix-timestamp", PYTHON, "-c", body])
    assert re.fullmatch(r"\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:a b\n", done.stdout)


def test_a_timestamp_comes_before_the_prefix(launch):
    done = launch([*RUN, "-np", "1", "--prefix-output-with-timestamp", "echo", "x"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \[0\] x\n", done.stdout)


def test_only_the_wanted_ranks_are_shown_but_failures_of_others_are_reported(launch):
    body = RANK + "print('hello'); sys.exit(6 if r == 1 else 0)"
    done = launch([*RUN, "-np", "3", "--ranks", "0,2", PYTHON, "-c", body], check=False)
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[2] hello"]
    assert done.returncode == 6 and "rank 1 (localhost" in done.stderr


def test_bytes_that_are_no_text_do_no_harm(launch):
    body = RANK + "os.write(1, bytes(range(256)) + b'\\nafter\\n')"
    out = launch([*RUN, "-np", "1", PYTHON, "-c", body]).stdout
    assert "\N{REPLACEMENT CHARACTER}" in out and out.endswith("[0] after\n")


def test_a_line_without_end_is_shown_in_pieces_and_loses_nothing(launch):
    body = (
        RANK + "os.write(1, b'y' * 1); [os.write(1, b'x' * 65536) for _ in range(20)]; os.write(1, b'z\\n')"
    )
    out = launch([*RUN, "-np", "1", PYTHON, "-c", body]).stdout
    text = "".join(line.removeprefix("[0] ") for line in out.splitlines())
    assert text == "y" + "x" * (20 * 65536) + "z"


def test_a_line_without_end_after_a_carriage_return_is_not_kept(capfd):
    stream = output.RankStream(0, output.STDOUT, output.Screen(output.Style()), None)
    stream.feed(b"50%\r")
    for _ in range(5):
        stream.feed(b"x" * 65536)
    assert capfd.readouterr().out == "[0] " + "x" * (4 * 65536) + "\n"


def test_a_progress_bar_in_a_log_is_its_last_state(launch):
    body = RANK + (
        "for i in range(50): sys.stderr.write(f'\\r{i:3d}%'); sys.stderr.flush()\n"
        "sys.stderr.write('\\n'); print('crlf\\r\\nnext', end='\\n')"
    )
    done = launch([*RUN, "-np", "1", PYTHON, "-c", body])
    assert done.stderr == "[0]  49%\n" and done.stdout == "[0] crlf\n[0] next\n"


FAIL = """
import logging
def deep(r):
    while r == 2 and "bad" not in open(os.environ["FIRST"]).read():
        time.sleep(0.05)  # the one that is shown is another rank's
    raise ValueError("bad learning rate")
try:
    deep(r)
except ValueError:
    if r == 2: logging.exception("mine")
    raise
"""


def test_a_traceback_of_all_ranks_is_shown_once(launch, tmp_path):
    env = {"FIRST": str(tmp_path / "rank.0" / "stderr")}
    # Every job has the files anew: rank 2 of one that finds those of the job before would not wait.
    command, program = [*RUN, "-np", "4", "--output-filename", tmp_path], [PYTHON, "-c", RANK + FAIL]
    done = launch([*command, *program], env=env, check=False)
    live = done.stderr[: done.stderr.index("horoclonerun: ")]
    assert live.count("in deep") == 1, live
    shown = re.findall(r"\[(\d)\] ValueError: bad learning rate  \(the traceback is rank (\d)'s\)", live)
    assert len(shown) == 4 and len({first for _, first in shown}) == 1, live
    for rank in range(4):
        assert "in deep" in (tmp_path / f"rank.{rank}" / "stderr").read_text(), "the files have all"
    done = launch([*command, "--horovod-format", *program], env=env, check=False)
    live = done.stderr[: done.stderr.index("horoclonerun: ")]
    assert live.count("in deep") == 1 and live.count("<stderr>:ValueError: bad learning rate  (the") == 4, (
        live
    )
    whole = launch([*command, "--verbose", *program], env=env, check=False)
    assert whole.stderr.count("in deep") >= 5


OF_TENSORFLOW = """Traceback (most recent call last):
  File "train.py", line 6, in <module>
    model.fit(x, y)
errors_impl.FailedPreconditionError: Graph execution error:

Detected at node DistributedSGD.0 defined at (most recent call last):
  File "train.py", line 6, in <module>

allreduce 'DistributedSGD.0': rank 1 announced float32[9], rank 0 announced float32[8].
\t [[{{node DistributedSGD.0}}]]
"""


def test_a_text_of_several_lines_is_shown_once_and_its_cause_is_the_verdict(capfd):
    screen = output.Screen(output.Style())
    streams = [output.RankStream(rank, output.STDERR, screen, None) for rank in range(2)]
    for stream in streams:
        for line in OF_TENSORFLOW.splitlines(keepends=True):
            stream.feed(line.encode())
        stream.finish()
    shown = capfd.readouterr().err
    cause = "allreduce 'DistributedSGD.0': rank 1 announced float32[9], rank 0 announced float32[8]."
    places = "  (train.py:6 in <module>: model.fit(x, y))"
    assert f"[0] errors_impl.FailedPreconditionError: Graph execution error: {cause}{places}\n" in shown
    assert shown.count("Detected at node") == 1 and shown.endswith(
        f"[1] {cause}\n[1] \t [[{{{{node DistributedSGD.0}}}}]]\n"
    )
    assert screen.in_sight() == {0, 1} and screen.whole_in_sight() == {1}  # of rank 0 one line is left
    lines = tuple(OF_TENSORFLOW.splitlines())
    ends = [report.RankEnd(rank, "h", 1, 1, 1.0, False, None, False, lines) for rank in range(2)]
    told, _ = report.failure_report(ends, None, 2)
    assert told.splitlines()[-1].endswith(f"FailedPreconditionError: Graph execution error: {cause}")
    assert told.count("Detected at node") == 1, told
    assert "Detected at node" not in report.failure_report(ends, None, 2, screen.in_sight())[0]


LIBRARY = f'  File "{output.__file__}", line 7, in wait\n    self._wait()\n    ^^^^^^^^^^^^\n'
STOOD = """Traceback (most recent call last):
  File "/x/train.py", line 23, in <module>
    main()
  File "/x/train.py", line 20, in main
    loss.backward()
"""


def _shown(capfd, screen: output.Screen, errors: list[str], prefix: str = "") -> str:
    """What the screen has of ranks whose tracebacks end so. prefix: before each line, as torch's."""
    for rank, error in enumerate(errors):
        stream = output.RankStream(rank, output.STDERR, screen, None)
        lines = (STOOD + LIBRARY + error).splitlines()
        stream.feed("".join(f"{prefix}{line}\n" for line in lines).encode())
        stream.finish()
        assert report.traceback_in([line.decode() for line in stream.tail]) == lines
    return capfd.readouterr().err


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_who_is_not_the_cause_says_in_one_line_where_it_stood(capfd, prefix):
    """Its frames inside the libraries filled the screen, and torch's prefix made each traceback come three times."""
    places = "(/x/train.py:23 in <module>, :20 in main: loss.backward())"
    aborted, raised = "horoclone.errors.Aborted: allreduce 'a. B': ", "rank 2 raised ValueError: bad batch"
    own = "ValueError: bad batch"
    shown = _shown(
        capfd, output.Screen(output.Style()), [f"{aborted}{raised}. Try again."] * 2 + [own], prefix
    )
    assert shown.startswith(
        f"[0] {aborted}{raised}.  {places}\n[1] {aborted}as rank 0 says  {places}\n[2] Traceback "
    )
    assert shown.count("_wait()") == 1 and shown.endswith(f"[2] {own}\n") and "[rank" not in shown
    of_group = "rank 0 of the process group is rank 2 of the job"
    shown = _shown(
        capfd, output.Screen(output.Style()), [f"{aborted}rank 0 raised KeyError. Try again. ({of_group})"]
    )
    assert f"KeyError. ({of_group})  {places}" in shown
    screen = output.Screen(output.Style())
    screen.number_in_errors = {0: 2, 1: -1, 2: 0}.__getitem__  # slot 1 has left
    assert _shown(capfd, screen, [f"{aborted}{raised}."] * 3).count("_wait()") == 1, (
        "but that of slot 2 is one line"
    )
    other = "rank 3 raised ValueError: bad batch"
    shown = _shown(
        capfd, output.Screen(output.Style()), [f"{aborted}{one}." for one in (raised, other)], prefix
    )
    assert other in shown, "another cause"
    whole = _shown(capfd, output.Screen(output.Style(), shows_all=True), [f"{aborted}{raised}"] * 2, prefix)
    assert whole.count("_wait()") == 2, "--verbose"


def test_tracebacks_that_differ_by_the_rank_alone_are_alike(capfd):
    errors = [f"ValueError: <Data object at 0x7f{rank}b> of rank {rank}: no file" for rank in range(2)]
    shown = _shown(capfd, output.Screen(output.Style(horovod=True)), errors)
    assert shown.count("loss.backward()") == 1, shown
    assert shown.endswith(f"[1]<stderr>:{errors[1]}  (the traceback is rank 0's)\n")
    shown = _shown(capfd, output.Screen(output.Style()), ["ValueError: batch 1", "ValueError: batch 2"])
    assert shown.count("loss.backward()") == 2, shown


def test_ranks_that_wait_for_each_other_say_it_once(capfd):
    circle = "rank 0 stands in allreduce 'a' at t.py:1, rank 1 in allreduce 'b' at t.py:2: none can go on. Is it so?"
    errors = [f"horoclone.errors.Mismatch: allreduce '{name}': {circle}" for name in "ab"]
    shown = _shown(capfd, output.Screen(output.Style()), errors)
    assert (
        shown.count("stands in") == 1
        and "\n[1] horoclone.errors.Mismatch: allreduce 'b': as rank 0 says" in shown
    )
    ends = [
        report.RankEnd(rank, "h", 1, 1, 1.0, False, None, False, (STOOD + error).splitlines())
        for rank, error in enumerate(errors)
    ]
    lines = report.failure_report(ends, None, 2, {0, 1})[0].splitlines()
    assert len(lines) == 2 and lines[1] == f"root cause: both ranks raised {errors[0]}"


OF_TORCH = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
RuntimeError: Error(s) in loading state_dict for Net:
\tsize mismatch for weight: copying a param with shape torch.Size([4]).
"""
AT_EXIT = {
    "warning": "/lib/resource_tracker.py:279: UserWarning: There appear to be 2 leaked objects\n  warnings.warn(\n",
    "ignored": "Exception ignored in: <function Pool.__del__ at 0x7f>\nTraceback (most recent call last):\n"
    '  File "pool.py", line 268, in __del__\nResourceWarning: unclosed pool\n',
    "thread": "Exception in thread Thread-1:\nTraceback (most recent call last):\n  File x\nConnectionError: gone\n",
    "logging": "WARNING:absl: not saved\n",
    "glog": "[rank0]:[W1130 06:57:39.123 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called\n",
}


@pytest.mark.parametrize(
    ("traceback", "cause"),
    [
        (OF_TORCH, "for Net: size mismatch for weight: copying a param with shape torch.Size([4])."),
        (
            OF_TENSORFLOW.replace("rank 1 announced float32[9], rank 0 announced float32[8].", "no memory"),
            "error: allreduce 'DistributedSGD.0': no memory",
        ),
        (
            OF_TORCH.partition("RuntimeError")[0] + "pydantic.ValidationError: 1 error\n",
            "ValidationError: 1 error",
        ),
        (
            OF_TORCH.partition("RuntimeError")[0]
            + "CommandError: it failed:\nwarnings: 2\n\nERROR: no space\n",
            "CommandError: it failed: ERROR: no space",
        ),
    ],
    ids=["torch", "tensorflow", "one line", "several lines"],
)
@pytest.mark.parametrize("last", AT_EXIT)
def test_what_is_printed_at_exit_is_not_the_cause(capfd, traceback, cause, last):
    ends = [report.RankEnd(0, "h", 1, 1, 1.0, False, None, False, (traceback + AT_EXIT[last]).splitlines())]
    assert report.failure_report(ends, None, 1)[0].endswith(f"{cause}")
    screen = output.Screen(output.Style())
    for rank in range(2):
        stream = output.RankStream(rank, output.STDERR, screen, None)
        stream.feed((traceback + AT_EXIT[last]).encode())
        stream.finish()
    shown = capfd.readouterr().err
    error = [line for line in traceback.splitlines() if line[:1].strip()][-1]
    assert f"[1] {error}  (the traceback is rank 0's)\n" in shown
    assert shown.count("[1] " + AT_EXIT[last].splitlines()[0]) == 1


def test_further_lines_of_an_exception_are_not_another_one():
    text = (
        OF_TORCH.partition("RuntimeError")[0] + "pydantic.ValidationError: 1 validation error for Job\nname\n"
    )
    ends = [report.RankEnd(0, "h", 1, 1, 1.0, False, text, False, ())]
    assert (
        "exit code 1: pydantic.ValidationError: 1 validation error for Job"
        in report.failure_report(ends, None, 1)[0]
    )
    lines = [*OF_TORCH.splitlines(), "closing: done"]
    assert report.traceback_in(lines) == lines[:-1], "an indented text ends before a line that is not"


def test_an_interrupt_after_an_error_of_several_lines_is_hidden(capfd):
    stream = output.RankStream(0, output.STDERR, output.Screen(output.Style()), None)
    stream.hide_interrupts = True
    interrupt = 'Traceback (most recent call last):\n  File "train.py", line 9\nKeyboardInterrupt\n'
    stream.feed((OF_TORCH + interrupt).encode())
    stream.finish()
    assert capfd.readouterr().err == "".join(f"[0] {line}\n" for line in OF_TORCH.splitlines())


NOISE = """
import atexit
folder, whose = sys.argv[1:]
def wait_for(path):
    while not os.path.exists(path) or "same cause" not in open(path).read(): time.sleep(0.02)
def noise():
    for i in range(300): print(r, "says", i, file=sys.stderr)
if whose == "its own":
    if r == 0: sys.exit()
    atexit.register(noise)
elif r == 0:
    atexit.register(wait_for, f"{folder}/rank.1/stderr")
else:
    wait_for(f"{folder}/rank.0/stderr")
    noise()
raise RuntimeError("same cause")
"""


@pytest.mark.parametrize(
    ("whose", "form"), [("its own", ()), ("its own", ("--horovod-format",)), ("another's", ())]
)
def test_a_report_repeats_a_traceback_that_has_scrolled_away(launch, tmp_path, whose, form) -> None:
    command = [
        *RUN,
        "-np",
        "2",
        "--output-filename",
        tmp_path,
        *form,
        PYTHON,
        "-c",
        RANK + NOISE,
        tmp_path,
        whose,
    ]
    done = launch(command, check=False)
    report = done.stderr[done.stderr.index("horoclonerun: ") :]
    assert "traceback:\n    | Traceback (most recent call last):" in report, done.stderr[-3000:]


def test_a_traceback_that_does_not_go_on_is_shown(launch, tmp_path):
    body = RANK + (
        "print('Traceback (most recent call last):', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
        "print('up')"
    )
    started = launch.start([*RUN, "-np", "1", PYTHON, "-c", body, tmp_path / "seen"])
    started.wait_for("Traceback")  # before the next line
    (tmp_path / "seen").touch()
    assert started.finish(30).stdout.count("Traceback") == 1


def _on_a_terminal(command: list[str], env: dict[str, str], columns: int = 0) -> str:
    """What a command has written to a terminal, which says that it has 0 columns, when it has ended."""
    whole = {**os.environ, "TERM": "xterm", **env}
    with on.terminal(command, columns, 24 if columns else 0, whole) as terminal:
        terminal.end()
    return terminal.text


def _left_on_screen(text: str) -> list[str]:
    """What a terminal would show in the end: carriage returns and line erasures are obeyed."""
    lines = []
    for raw in text.split("\n"):
        line = ""
        for part in raw.replace("\r\x1b[K", "\r\x00").split("\r"):
            line = part[1:] if part.startswith("\x00") else part + line[len(part) :]
        lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line))
    return lines


def test_a_terminal_gets_a_colour_per_rank_unless_no_color_is_set():
    command = [*RUN, "-np", "2", "echo", "x"]
    text = _on_a_terminal(command, {"NO_COLOR": ""})
    colours = set(re.findall(r"\x1b\[(\d+)m\[\d\]\x1b\[0m x", text))
    assert len(colours) == 2
    plain = _on_a_terminal(command, {"NO_COLOR": "1"})
    assert "\x1b[" not in plain and plain.count("] x") == 2


def test_a_progress_bar_on_a_terminal_stays_at_the_bottom_while_others_print():
    body = RANK + (
        "if r == 0:\n"
        "    for i in range(10):\n"
        "        sys.stderr.write(f'\\r{i * 10:3d}% ' + '#' * 200); sys.stderr.flush(); time.sleep(0.05)\n"
        "    sys.stderr.write('\\rdone' + ' ' * 250 + '\\n')\n"
        "else:\n"
        "    for i in range(5): time.sleep(0.1); print('line', i, flush=True)\n"
    )
    text = _on_a_terminal([*RUN, "-np", "2", PYTHON, "-c", body], {"NO_COLOR": "1"})
    shown = [line.rstrip() for line in _left_on_screen(text)]
    assert [line for line in shown if line.startswith("[1]")] == [f"[1] line {i}" for i in range(5)]
    assert "[0] done" in shown, shown
    assert text.count("%") >= 8, "the updates were not drawn"
    assert not [line for line in shown if "%" in line], shown
    updates = re.findall(r"\[0\] +\d+% #*", text)
    assert updates and max(len(update) for update in updates) < 80, "an update wraps and could not be erased"


@pytest.mark.parametrize("columns, room", [(0, 80), (40, 40)])
def test_a_terminal_of_width_0_is_taken_for_one_of_80_columns(columns, room):
    body = RANK + "sys.stderr.write('\\r' + '#' * 200); sys.stderr.flush(); time.sleep(0.5); print()"
    text = _on_a_terminal([*RUN, "-np", "1", PYTHON, "-c", body], {"NO_COLOR": "1"}, columns)
    assert len(re.findall(r"#+", text)[0]) == room - 1 - len("[0] "), text


def test_a_prompt_without_newline_shows_up_on_a_terminal():
    body = RANK + "sys.stdout.write('continue? '); sys.stdout.flush(); time.sleep(1.0); print('yes')"
    text = _on_a_terminal([*RUN, "-np", "1", PYTHON, "-c", body], {"NO_COLOR": "1"})
    assert "[0] continue? " in text.split("yes")[0]
    assert "[0] continue? yes" in [line.rstrip() for line in _left_on_screen(text)]
