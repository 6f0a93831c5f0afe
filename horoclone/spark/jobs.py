"""The launcher's jobs (launch/job.py, launch/elastic_job.py) where Spark's tasks are hosts. Thread: the caller's."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TextIO

from horoclone.launch import termination
from horoclone.launch.elastic_job import ElasticJob
from horoclone.launch.elastic_options import Elastic
from horoclone.launch.environment import job_environment
from horoclone.launch.hosts import Host, Placement, place
from horoclone.launch.job import Job, JobRequest, JobResult
from horoclone.launch.link import LOST, Link
from horoclone.launch.output import NOBODY_READS, STDERR, STDOUT, Screen, Style
from horoclone.launch.usage import LaunchError
from horoclone.spark.session import Stage
from horoclone.spark.task_server import Task, TaskServer, by_machine

_PARAMETERS = {
    "--elastic-timeout (seconds)": "elastic_timeout",
    "--elastic-timeout": "elastic_timeout",
    "--min-np": "min_num_proc",
}
REASON_S = 3.0  # for Spark to say why a task was lost
# Of the driver's settings these are about the driver's own process, if it is a rank of something itself.
_OWN = (
    "RANK", "SIZE", "RENDEZVOUS", "JOB", "HOSTNAME", "SECRET", "FUNCTION", "MEMBER", "ELASTIC",
    "GLOO_RENDEZVOUS"
)  # fmt: skip


class StreamScreen(Screen):
    """The ranks' lines on the streams that the caller gives; None: sys.stdout and sys.stderr of now."""

    def __init__(self, style: Style, stdout: TextIO | None, stderr: TextIO | None) -> None:
        super().__init__(style)
        self._terminal = {STDOUT: False, STDERR: False}
        self._streams = {STDOUT: stdout or sys.stdout, STDERR: stderr or sys.stderr}

    def _write(self, stream: int, data: bytes) -> None:
        target = self._streams[stream]
        try:
            target.write(data.decode(errors="replace"))
            if flush := getattr(target, "flush", None):  # print() does without it, too
                flush()
        except (OSError, ValueError, AttributeError):
            self.broken = NOBODY_READS


def placements_of(tasks: Sequence[Task]) -> list[Placement]:
    """Ranks, host by host: first that of the first task's, in each in the order of partitions."""
    ordered = by_machine(tasks)
    counts = Counter(task.machine for task in ordered)  # in this order
    numbers = place(len(ordered), [Host(machine, count) for machine, count in counts.items()])
    return [one._replace(host=task.name) for one, task in zip(numbers, ordered, strict=True)]


def environment_of(
    env: Mapping[str, str] | None, nics: Sequence[str] | None, start_timeout_s: float
) -> dict[str, str]:
    """What the ranks get beside the variables of their executors: the driver's settings, and what the caller gives."""
    ours = {}
    for name, value in os.environ.items():
        brand, _, rest = name.partition("_")
        if brand in ("HOROVOD", "HOROCLONE") and not rest.startswith((*_OWN, "LOCAL_", "CROSS_")):
            ours[name] = value
    settings = (
        {"HOROVOD_START_TIMEOUT": f"{start_timeout_s:g}"} if "HOROVOD_START_TIMEOUT" not in ours else {}
    )
    if nics:
        settings["HOROVOD_GLOO_IFACE"] = ",".join(nics)
    return job_environment({**ours, **(env or {})}, settings)


def request_of(
    placements: Sequence[Placement],
    environment: Mapping[str, str],
    screen: Screen,
    server: TaskServer,
    verbose: int,
) -> JobRequest:
    """Command and folder are the executors' matter (slot.py)."""
    return JobRequest(
        placements=placements,
        command=[],
        environment=environment,
        cwd="",
        screen=screen,
        threads="off",  # Spark has set OMP_NUM_THREADS to the cores of a task
        verbose=verbose >= 2,
        give_stdin=False,
        transport=server,
    )


class _SaysWhy:
    """What Spark knows about a task that was lost."""

    _stage: Stage

    def _explained(self, why: LaunchError, stage: str) -> LaunchError:
        if stage == LOST:
            self._stage.join(REASON_S)
        reason = self._stage.reason()
        return LaunchError(f"{why}; Spark says: {reason}", why.exit_code) if reason else why


class SparkJob(_SaysWhy, Job):
    """Use once. One task is lost: Spark ends the others, and the job fails."""

    def __init__(self, request: JobRequest, stage: Stage) -> None:
        super().__init__(request)
        self._stage = stage

    def host_lost(self, link: Link, why: LaunchError, stage: str) -> None:
        super().host_lost(link, why, stage)
        for rank in link.ranks:
            member = self._members[rank]
            if member.note:  # the text of what was lost
                member.note = str(self._explained(why, stage))


class SparkElasticJob(_SaysWhy, ElasticJob):
    """Use once. A task that is lost is one slot less, one that comes is one more."""

    def __init__(self, request: JobRequest, elastic: Elastic, stage: Stage, tasks: int) -> None:
        """tasks: of the stage; more slots there will never be."""
        super().__init__(request, elastic)
        self._stage, self._tasks = stage, tasks

    def _turn(self) -> None:
        super()._turn()
        if self._stage.over and not (self.is_ending() or self._supervisor.finishing):
            text = f"Spark has ended the tasks of the job: {self._stage.reason() or 'they all returned'}"
            self._supervisor.end(time.monotonic(), self._supervisor.workers.values(), text)

    def more_hosts_to_come(self) -> bool | None:
        return len(self._supervisor.policy.hosts()) < self._tasks

    def _result(self) -> JobResult:
        """With the values of all ranks of the last generation, and our names of parameters."""
        result = super()._result()
        for flag, parameter in _PARAMETERS.items():
            result = result._replace(text=(result.text or "").replace(flag, parameter) or None)
        if (
            result.exit_code != 0
            or not self._supervisor.has_formed
            or self._termination.reason == termination.FAILURE
        ):
            return result
        ranks = [self._members[worker.number] for worker in self._supervisor.ranks()]
        values = {rank: member.result for rank, member in enumerate(ranks) if member.result}
        return result._replace(results=result.results | values)
