"""Under Horovod's name: a process on another host that runs one command for whoever holds the key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horoclone.runner.common.util import network, safe_shell_exec
from horoclone.runner.common.util.timeout import Timeout
from horoclone.runner.util.streams import Pipe
from horoclone.runner.util.threads import in_thread

WAIT_FOR_COMMAND_MIN_DELAY = 0.1


class RunCommandRequest:
    """Runs a line for a shell, once: a second request changes nothing."""

    def __init__(
        self,
        command: str,
        env: Mapping[str, str | None],
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        self.command = command
        self.env = env
        self.capture_stdout = capture_stdout
        self.capture_stderr = capture_stderr
        self.prefix_output_with_timestamp = prefix_output_with_timestamp


class StreamCommandOutputRequest:
    """What does the command print? Answered when it has been started."""


class StreamCommandStdOutRequest(StreamCommandOutputRequest):
    """On stdout."""


class StreamCommandStdErrRequest(StreamCommandOutputRequest):
    """On stderr."""


class CommandOutputNotCaptured(Exception):
    """The answer where the command was started without capturing that stream."""


class AbortCommandRequest:
    """Ends the command."""


class CommandExitCodeRequest:
    """Has the command ended?"""


class CommandExitCodeResponse:
    """exit_code: None while it runs."""

    def __init__(self, terminated: bool, exit_code: int | None) -> None:
        self.terminated = terminated
        self.exit_code = exit_code


class WaitForCommandExitCodeRequest:
    """Answered when the command has ended; delay: seconds between two looks."""

    def __init__(self, delay: float) -> None:
        self.delay = delay


class WaitForCommandExitCodeResponse:
    """Of the command."""

    def __init__(self, exit_code: int | None) -> None:
        self.exit_code = exit_code


class NotifyInitialRegistrationCompleteRequest:
    """All tasks have registered."""


class RegisterCodeResultRequest:
    """What the command computed."""

    def __init__(self, result: Any) -> None:
        self.result = result


class BasicTaskService(network.BasicService):
    """command_env: the environment of the command, to which that of the request is added; None: only the request's."""

    def __init__(
        self,
        name: str,
        index: int,
        key: bytes,
        nics: Sequence[str] | None,
        command_env: Mapping[str, str] | None = None,
        verbose: int = 0,
    ) -> None:
        self._index, self._command_env, self._verbose = index, command_env, verbose
        self._changed = threading.Condition()
        self._is_registered = False  # this and the rest guarded by _changed
        self._command_thread: threading.Thread | None = None
        self._command_exit_code: int | None = None
        self._pipes: dict[type, Pipe | None] = {}
        self._abort = threading.Event()
        self._fn_result: Any = None
        self._is_done = self._closed = False
        super().__init__(name, key, nics)

    def _handle(self, req: Any, client_address: network.Address) -> Any:
        if isinstance(req, RunCommandRequest):
            self._start(req)
        elif isinstance(req, StreamCommandOutputRequest):
            self.wait_for_command_start()
            return self.stream_output(self._pipes.get(type(req)))
        elif isinstance(req, AbortCommandRequest):
            self._abort.set()
            for pipe in self._pipes.values():
                if pipe is not None:
                    pipe.close()
        elif isinstance(req, NotifyInitialRegistrationCompleteRequest):
            with self._changed:
                self._is_registered = True
                self._changed.notify_all()
        elif isinstance(req, CommandExitCodeRequest):
            ended = self._has_ended()
            return CommandExitCodeResponse(ended, self._command_exit_code if ended else None)
        elif isinstance(req, WaitForCommandExitCodeRequest):
            with self._changed:
                while not self._has_ended() and not self._closed:
                    self._changed.wait(max(req.delay, WAIT_FOR_COMMAND_MIN_DELAY))
            return WaitForCommandExitCodeResponse(self._command_exit_code)
        elif isinstance(req, RegisterCodeResultRequest):
            self._fn_result = req.result
        else:
            return super()._handle(req, client_address)
        return network.AckResponse()

    def _has_ended(self) -> bool:
        return self._is_done

    def _start(self, req: RunCommandRequest) -> None:
        with self._changed:
            if self._command_thread is not None:
                return
            env: dict[str, str] = dict(self._command_env or {})
            for name, value in req.env.items():
                if value is None:
                    env.pop(name, None)
                else:
                    env[name] = value
            out = Pipe() if req.capture_stdout else None
            err = Pipe() if req.capture_stderr else None
            self._pipes = {StreamCommandStdOutRequest: out, StreamCommandStdErrRequest: err}
            self._command_thread = in_thread(self._run, (req, env, out, err))
            self._changed.notify_all()

    def _run(self, req: RunCommandRequest, env: dict[str, str], out: Pipe | None, err: Pipe | None) -> None:
        try:
            self._command_exit_code = safe_shell_exec.execute(
                req.command,
                env=env,
                stdout=out,
                stderr=err,
                index=self._index,
                prefix_output_with_timestamp=req.prefix_output_with_timestamp,
                events=[self._abort],
            )
        finally:
            for pipe in (out, err):
                if pipe is not None:
                    pipe.close()
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def shutdown(self) -> None:
        """Stops listening; whoever waits for the command hears that nothing is known of it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().shutdown()

    def fn_result(self) -> Any:
        """What RegisterCodeResultRequest brought."""
        return self._fn_result

    def wait_for_initial_registration(self, timeout: Any) -> None:
        """Until all tasks have registered. timeout: a Timeout, whose exception it raises."""
        self._wait(lambda: self._is_registered, timeout, "tasks to start")

    def wait_for_command_start(self, timeout: Any = None) -> None:
        """Until there is a command. timeout: as above; None: without a limit."""
        self._wait(lambda: self._command_thread is not None or self._closed, timeout, "command to run")

    def check_for_command_start(self, seconds: float) -> bool:
        """Whether there is a command within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._command_thread is not None, seconds)

    def _wait(self, is_so: Callable[[], bool], timeout: Timeout | None, activity: str) -> None:
        with self._changed:
            while not is_so():
                self._changed.wait(None if timeout is None else timeout.remaining())
                if timeout is not None and not is_so():
                    timeout.check_time_out_for(activity)

    def wait_for_command_termination(self) -> None:
        """Until the command has ended. RuntimeError when there is none."""
        if self._command_thread is None:
            raise RuntimeError("no command was started")
        self._command_thread.join()

    def command_exit_code(self) -> int | None:
        """None while it runs."""
        return self._command_exit_code

    def stream_output(self, stream: Pipe | None) -> Any:
        """The answer to a request for a stream of the command."""
        return CommandOutputNotCaptured() if stream is None else (network.AckStreamResponse(), stream)


class BasicTaskClient(network.BasicClient):
    """Speaks to such a service."""

    def __init__(
        self,
        service_name: str,
        task_addresses: Any,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        attempts: int = 3,
    ) -> None:
        super().__init__(service_name, task_addresses, key, verbose, match_intf=match_intf, attempts=attempts)

    def run_command(
        self,
        command: str,
        env: Mapping[str, str | None],
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        """See RunCommandRequest."""
        self._send(
            RunCommandRequest(command, env, capture_stdout, capture_stderr, prefix_output_with_timestamp)
        )

    def stream_command_output(
        self, stdout: Any = None, stderr: Any = None
    ) -> tuple[threading.Thread | None, threading.Thread | None]:
        """Copies what the command prints into these, on threads that it returns. The command ends when that fails."""

        def copy(request: StreamCommandOutputRequest, stream: Any) -> None:
            try:
                self._send(request, stream)
            except Exception:
                self.abort_command()
                raise

        wanted = ((StreamCommandStdOutRequest(), stdout), (StreamCommandStdErrRequest(), stderr))
        out, err = (in_thread(copy, pair) if pair[1] is not None else None for pair in wanted)
        return out, err

    def abort_command(self) -> None:
        """Ends the command."""
        self._send(AbortCommandRequest())

    def notify_initial_registration_complete(self) -> None:
        """Tells the task that all have registered."""
        self._send(NotifyInitialRegistrationCompleteRequest())

    def command_terminated(self) -> bool:
        """Whether it has ended."""
        return self.command_result()[0]

    def command_result(self) -> tuple[bool, int | None]:
        """(whether it has ended, its exit code)."""
        answer = self._send(CommandExitCodeRequest())
        return answer.terminated, answer.exit_code

    def register_code_result(self, result: Any) -> None:
        """See RegisterCodeResultRequest."""
        self._send(RegisterCodeResultRequest(result))

    def wait_for_command_termination(self, delay: float = 1.0) -> None:
        """Until the command has ended, or the task is gone."""
        self.wait_for_command_exit_code(delay)

    def wait_for_command_exit_code(self, delay: float = 1.0) -> int | None:
        """Its exit code; None when the task is gone."""
        try:
            return self._send(WaitForCommandExitCodeRequest(delay)).exit_code  # type: ignore[no-any-return]
        except (OSError, EOFError):
            return None
