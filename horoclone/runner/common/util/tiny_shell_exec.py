"""Under Horovod's name: a shell command's output as a text."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Mapping

from horoclone.runner.common.util import safe_shell_exec


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """(stdout and stderr as they came, exit code). None, with the traceback on stderr, when it cannot be run at all."""
    output = io.StringIO()
    try:
        exit_code = safe_shell_exec.execute(command, env=env, stdout=output, stderr=output)
    except Exception:
        print(traceback.format_exc(), file=sys.stderr)
        return None
    return output.getvalue(), exit_code
