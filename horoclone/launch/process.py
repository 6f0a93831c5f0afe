"""Local ranks: started without a shell, each the leader of its own session, none left behind whatever happens to us.

The launcher uses it, and remote.py on other hosts. Thread: the one that started them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from horoclone.anonymous_file import anonymous_file
from horoclone.launch.usage import LaunchError, is_out_of_descriptors, out_of_processes

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.1
# From <linux/fcntl.h>; the fcntl module names them only where the C library of the build did.
_F_ADD_SEALS, _SEAL_WRITE, _SEAL_GROW, _SEAL_SHRINK, _SEAL_SEAL = 1033, 0x8, 0x4, 0x2, 0x1


def sealed_memory(name: str, content: bytes) -> int:
    """A descriptor of anonymous read-only memory with `content`; children read it with pread, as often as they like."""
    descriptor = anonymous_file(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    try:
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_WRITE | _SEAL_GROW | _SEAL_SHRINK | _SEAL_SEAL)
        return descriptor
    except OSError:  # a file on disk
        try:
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)


def read_memory(descriptor: int) -> bytes:
    """The whole content of such a descriptor, wherever its file offset is."""
    parts, offset = [], 0
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def dies_with_parent() -> Callable[[], None]:
    """For preexec_fn: the kernel kills the child when the thread that started it is gone. Everything is looked up here,
    before the fork, so that the child only makes two system calls."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent, kill = os.getpid(), int(signal.SIGKILL)

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before we asked
            os.kill(os.getpid(), kill)

    return arm


def _has_live_process(group: int) -> bool:
    """Whether /proc shows a process of the group that is not a zombie."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, its_group = file.read().rpartition(b") ")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in (b"Z", b"X"):
            return True
    return False


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(3.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Reaper:
    """Our end of reaper.py."""

    def __init__(self) -> None:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reaper.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", path, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            bufsize=0,
        )

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except OSError:  # somebody killed it; the ranks' own parent-death signal remains
            pass

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        _wait_or_kill(self._process)


class OutputRelay:
    """Our end of output_relay.py; in the place of a Reaper for ranks that shall outlive us."""

    def __init__(self) -> None:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "output_relay.py")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", path, str(os.getpid())],
                stdin=theirs.fileno(),
                start_new_session=True,
                cwd="/",
            )

    def hold(self, pid: int, rank: str, pipes: Sequence[int], folder: str) -> None:
        """rank: as its lines begin. folder: of the rank's files of output, or empty."""
        self._tell(f"+{pid} {rank} {folder}", pipes)

    def forget(self, pid: int) -> None:
        self._tell(f"-{pid}")

    def _tell(self, message: str, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._channel, [message.encode()], list(descriptors))
        except OSError:  # somebody killed it: the ranks end when they write after our death
            pass

    def close(self) -> None:
        self._tell(".")
        self._channel.close()
        _wait_or_kill(self._process)


class LocalRank:
    """One process and its group. `code` is None while it runs, then as subprocess has it: -N for signal N."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], reaper: Reaper | OutputRelay, result: int | None
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.rank = rank
        self.pid = process.pid
        self.stdout: IO[bytes] = process.stdout
        self.stderr: IO[bytes] = process.stderr
        self.code: int | None = None
        self.result = result  # memfd where the process leaves the value of horoclone.run's function
        self._process = process
        self._reaper = reaper
        self._group_gone = False
        self._look_again_s = 0.0
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            pass  # an old kernel: the owner polls

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._process.poll()
        return self.code

    def signal(self, number: int, group: bool = False) -> None:
        """To the process alone (it decides what its children hear), or to everything in its group."""
        try:
            if group:
                if not self._group_gone:
                    os.killpg(self.pid, number)
            elif self.poll() is None:
                os.kill(self.pid, number)
        except ProcessLookupError:
            if group:
                self._mark_gone()
        except PermissionError:
            pass

    def group_alive(self) -> bool:
        """Whether any process of the group is left."""
        if self._group_gone:
            return False
        if self.poll() is None:
            return True
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            self._mark_gone()
            return False
        except PermissionError:
            return True
        # Orphans that have ended count until PID 1 reaps them, which in containers may take seconds, or for ever.
        now = time.monotonic()
        if now >= self._look_again_s:
            self._look_again_s = now + _LOOK_EVERY_S
            if not _has_live_process(self.pid):
                self._mark_gone()
        return not self._group_gone

    def _mark_gone(self) -> None:
        if not self._group_gone and self.poll() is not None:
            self._group_gone = True
            self._reaper.forget(self.pid)

    def close(self) -> None:
        for stream in (self.stdout, self.stderr):
            stream.close()
        for descriptor in (self.pidfd, self.result):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.pidfd, self.result = -1, None


class LocalRanks:
    """Starts processes and owns what they inherit: the job secret and, for horoclone.run, the function."""

    def __init__(
        self, secret: bytes, payload: bytes | None, bind_to_us: bool = True, outlive_us: bool = False
    ) -> None:
        """bind_to_us: also ask the kernel to kill them with us (not for horoclone.run: a caller's thread may end, and
        its process has threads that make code between fork and exec risky; the reaper is enough there).
        outlive_us: they go on when we die; close() ends them all the same."""
        try:
            self.reaper = Reaper()
            self._relay = OutputRelay() if outlive_us else None
        except BlockingIOError:
            raise out_of_processes("a process of the launcher's own") from None
        self._secret = sealed_memory("horoclone-secret", secret)
        self._payload = sealed_memory("horoclone-function", payload) if payload is not None else None
        self._arm = dies_with_parent() if bind_to_us and not outlive_us else None
        self._started: list[LocalRank] = []

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        stdin: int | None = None,
        folder: str = "",
        metrics: tuple[int, int] | None = None,
    ) -> LocalRank:
        """LaunchError with exit code 127 or 126 when the command cannot be run. stdin None: /dev/null. folder: where
        its output goes, too; only a relay asks. metrics: JobMetrics.passed()."""
        inherited = [self._secret]
        environment = {**environment, "HOROCLONE_SECRET_FD": str(self._secret)}
        if metrics is not None:
            inherited.append(metrics[0])
            environment["HOROCLONE_RANK_METRICS"] = f"{metrics[0]}:{metrics[1]}"
        result = None
        if self._payload is not None:
            result = anonymous_file("horoclone-result")
            inherited += [self._payload, result]
            environment["HOROCLONE_FUNCTION_FDS"] = f"{self._payload},{result}"
        try:
            process = subprocess.Popen(
                list(command),
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=inherited,
                preexec_fn=self._arm,
            )
        except (OSError, ValueError) as error:
            if result is not None:
                os.close(result)
            if is_out_of_descriptors(error):
                raise
            raise _cannot_run(command[0], cwd, error) from None
        if self._relay is None:
            self.reaper.watch(process.pid)
        else:
            assert process.stdout is not None and process.stderr is not None
            pipes = (process.stdout.fileno(), process.stderr.fileno())
            self._relay.hold(process.pid, environment.get("HOROVOD_RANK", str(rank)), pipes, folder)
        self._started.append(LocalRank(rank, process, self._relay or self.reaper, result))
        return self._started[-1]

    def forget(self, local: LocalRank) -> None:
        """Its process, group and output are gone: what they have cost is given back."""
        local.close()
        self._started.remove(local)

    def close(self) -> None:
        """Kills what is left, then lets go of everything."""
        for local in self._started:
            local.signal(signal.SIGKILL, group=True)
        for local in self._started:
            try:
                local._process.wait(2.0)
            except subprocess.TimeoutExpired:
                # in an uninterruptible system call; the reaper's registration stays
                pass
            local.group_alive()
            local.close()
        self.reaper.close()
        if self._relay is not None:
            self._relay.close()
        for descriptor in (self._secret, self._payload):
            if descriptor is not None:
                os.close(descriptor)


def _cannot_run(program: str, cwd: str, error: Exception) -> LaunchError:
    if isinstance(error, OSError) and error.filename == cwd and not os.path.isdir(cwd):
        return LaunchError(f"the working folder {cwd} is not there: {error.strerror}", 126)
    if isinstance(error, FileNotFoundError):
        from horoclone.launch.command_line import did_you_mean, programs_on_path

        text = f"cannot run {program!r}: no such command on PATH and no such file in {cwd}"
        if os.path.isfile(os.path.join(cwd, f"{program}.py")):
            return LaunchError(f"{text}; did you mean python {program}.py?", 127)
        return LaunchError(text + did_you_mean(program, programs_on_path()), 127)
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.ENOEXEC):
        why = "it is not executable"
        if error.errno == errno.ENOEXEC:
            why = "it is neither a program for this kind of machine nor a script that begins with #!"
        if os.path.isdir(os.path.join(cwd, program)):
            why = "it is a folder"
        interpreter = "sh" if program.endswith(".sh") else "python"
        return LaunchError(f"cannot run {program!r}: {why} ({interpreter} {program}?)", 126)
    if isinstance(error, BlockingIOError):
        return out_of_processes(repr(program))
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return LaunchError(f"cannot run {program!r}: {reason}", 126)


_OWN_CGROUPS = "/proc/self/cgroup"
_CGROUPS = "/sys/fs/cgroup"
_MAX_CGROUPS = 256  # below ours; more are not looked at


def memory_kills() -> int:
    """How often the kernel has killed a process in our memory cgroup, or below it, for want of memory; 0 where it does
    not say."""
    try:
        with open(_OWN_CGROUPS, encoding="ascii", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return 0
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            for folder in (f"{_CGROUPS}{path}", _CGROUPS):
                if (kills := _kills_in(f"{folder}/memory.events")) is not None:
                    return kills
        elif "memory" in controllers.split(","):
            for folder in (f"{_CGROUPS}/memory{path}", f"{_CGROUPS}/memory"):
                if (kills := _kills_in(f"{folder}/memory.oom_control")) is not None:
                    return kills + _kills_below(folder)
    return 0


def _kills_in(file_name: str) -> int | None:
    try:
        with open(file_name, encoding="ascii") as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def _kills_below(folder: str) -> int:
    """Version 1 counts where the process was, not in the groups above; a scheduler may give each rank its own."""
    kills = 0
    for count, (below, _, _) in enumerate(os.walk(folder)):
        if count > _MAX_CGROUPS:
            break
        if below != folder:
            kills += _kills_in(f"{below}/memory.oom_control") or 0
    return kills
