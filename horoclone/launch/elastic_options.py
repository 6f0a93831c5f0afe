"""Parses --min-np and its companions: where hosts come from, how many ranks, what is done about failures."""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

from horoclone.launch.discovery import File, Fixed, Script, Source
from horoclone.launch.elastic_policy import Cooldown, Plan
from horoclone.launch.host_sources import source_of
from horoclone.launch.hosts import Host, automatic_size, parse_hostfile, parse_hosts
from horoclone.launch.usage import LaunchError
from horoclone.membership import snapshot

NOTICE_SIGNALS = ("USR1", "USR2")


class Elastic(NamedTuple):
    """What --min-np and its companions say. notice_signal: beside SIGTERM.

    size: of the first generation; 0: as many as there is room for when it starts.
    """

    source: Source
    size: int
    plan: Plan
    cooldown: Cooldown
    timeout_s: float = 600.0
    resets: int | None = None
    notice_script: str | None = None
    notice_signal: str = ""
    outlives: bool = False  # the ranks go on when the launcher dies


def elastic_of(arguments: argparse.Namespace, program: str) -> Elastic | None:
    """What the flags ask for; None: a job that is not elastic. LaunchError when they do not fit together."""
    if not (
        arguments.min_np or arguments.max_np or arguments.host_discovery_script or arguments.host_discovery
    ):
        for flag in (
            "slots_per_host", "elastic_timeout", "reset_limit", "blacklist_cooldown_range", "spares",
            "notice_script", "notice_signal", "survive_launcher"
        ):  # fmt: skip
            if getattr(arguments, flag, None):
                raise LaunchError(
                    f"--{flag.replace('_', '-')} is for elastic jobs; --min-np N makes the job elastic"
                )
        return None
    source, slots = _source_of(arguments)
    size = slots if arguments.num_proc == "auto" else arguments.num_proc or arguments.min_np
    if not size:
        raise LaunchError("how many ranks at first? -np N, or -np auto where the hosts are given")
    smallest, largest = arguments.min_np or size, arguments.max_np
    if smallest > size or (largest is not None and largest < size):
        raise LaunchError(f"--min-np {smallest} <= -np {size} <= --max-np {largest or 'N'} does not hold")
    if not source.changes and slots < smallest:
        raise LaunchError(f"--min-np {smallest} needs {smallest} slots, but the hosts have {slots}")
    outlives = bool(getattr(arguments, "survive_launcher", False))
    if outlives and max(size, largest or 0) > snapshot.MAX_MEMBERS:
        raise LaunchError(f"--survive-launcher is for at most {snapshot.MAX_MEMBERS} ranks")
    bounds = arguments.blacklist_cooldown_range
    try:
        cooldown = Cooldown((bounds[0], bounds[1]) if bounds else None)
    except ValueError as error:
        raise LaunchError(f"--blacklist-cooldown-range: {error}") from None
    timeout_s = arguments.elastic_timeout
    if timeout_s is None:
        timeout_s = 600.0
    plan = Plan(smallest, largest, arguments.spares or 0, program == "horovodrun")
    return Elastic(
        source, size, plan, cooldown, timeout_s, arguments.reset_limit, arguments.notice_script,
        _signal_name(arguments.notice_signal), outlives,
    )  # fmt: skip


def _signal_name(text: str | None) -> str:
    """USR1 or USR2, as horoclone.runtime.member reads it. LaunchError for others."""
    name = (text or "").upper().removeprefix("SIG")
    if name and name not in NOTICE_SIGNALS:
        raise LaunchError(
            f"--notice-signal {text}: it can be {' or '.join(NOTICE_SIGNALS)}; SIGTERM always counts"
        )
    return name


def needs_majority(quorum: str, one_host: bool) -> bool:
    """HOROCLONE_ELASTIC_QUORUM. LaunchError for another word."""
    if quorum not in ("", "majority", "any"):
        raise LaunchError(f"HOROCLONE_ELASTIC_QUORUM={quorum!r} is neither majority nor any")
    return quorum == "majority" or (not quorum and not one_host)


def _source_of(arguments: argparse.Namespace) -> tuple[Source, int]:
    """Where hosts come from, and the slots that are known before anybody has looked."""
    flags = ("host_discovery_script", "host_discovery", "hosts", "hostfile")
    if sum(bool(getattr(arguments, flag)) for flag in flags) > 1:
        raise LaunchError(
            "-H, --hostfile, --host-discovery and --host-discovery-script all name the hosts; give one of them"
        )
    if arguments.host_discovery_script:
        return Script(arguments.host_discovery_script, arguments.slots_per_host), 0
    if arguments.host_discovery:
        source = source_of(arguments.host_discovery, arguments.slots_per_host, os.environ)
        if source.changes:
            return source, 0
        hosts = source.find()
        return Fixed(hosts), sum(host.slots for host in hosts)
    if arguments.hostfile:
        return File(arguments.hostfile), sum(host.slots for host in parse_hostfile(arguments.hostfile))
    if arguments.hosts:
        hosts = parse_hosts(arguments.hosts)
    else:
        size = arguments.num_proc if isinstance(arguments.num_proc, int) else automatic_size(None)
        hosts = [Host("localhost", max(size, arguments.max_np or 0) + (arguments.spares or 0))]
    return Fixed(hosts), sum(host.slots for host in hosts)
