"""The command line of horoclonerun: horovodrun's flags and ours. A flag beats the environment, which beats the file.

Each setting is tied to its variable and its place in the YAML file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from horoclone.launch.command_line import Parser, number
from horoclone.launch.hosts import MAX_SLOTS
from horoclone.launch.usage import LaunchError, NotYet
from horoclone.settings import START_TIMEOUT_S


class Setting(NamedTuple):
    """A flag that becomes a variable of every rank. place: section and key of the YAML file."""

    flag: str
    variable: str
    place: str
    kind: Callable[[str], Any]
    help: str
    scale: int = 1
    inverted: bool = False  # the variable says the opposite of the flag
    off_flag: str | None = None  # for bool; None: "--no-" + flag


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _amount(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _level(text: str) -> str:
    if text.strip().lower() not in _LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_LEVELS)}")
    return text


SETTINGS = (
    Setting("fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", "params.fusion_threshold_mb", _count,
            "largest buffer that one collective may fuse, in MiB", scale=1 << 20),
    Setting("cycle-time-ms", "HOROVOD_CYCLE_TIME", "params.cycle_time_ms", _amount,
            "upper bound of the batching delay, in ms"),
    Setting("cache-capacity", "HOROVOD_CACHE_CAPACITY", "params.cache_capacity", _count,
            "agreements remembered; 0 turns the plan cache off"),
    Setting("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "params.hierarchical_allreduce", bool,
            "two-level allreduce across hosts"),
    Setting("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", "params.hierarchical_allgather", bool,
            "two-level allgather across hosts"),
    Setting("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", "params.torus_allreduce", bool,
            "two-dimensional allreduce across hosts"),
    Setting("autotune", "HOROVOD_AUTOTUNE", "autotune.enabled", bool, "search for good values of the tunables"),
    Setting("autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "autotune.log_file", str, "where the search is logged"),
    Setting("autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples", _count,
            "samples thrown away first"),
    Setting("autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample", _count,
            "steps in one sample"),
    Setting("autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            "autotune.bayes_opt_max_samples", _count, "samples at most"),
    Setting("autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "autotune.gaussian_process_noise", _amount, "noise expected in a sample, 0 to 1"),
    Setting("timeline-filename", "HOROVOD_TIMELINE", "timeline.filename", str, "write a Chrome trace there"),
    Setting("timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "timeline.mark_cycles", bool,
            "mark engine cycles in the trace"),
    Setting("stall-check", "HOROVOD_STALL_CHECK_DISABLE", "stall_check.enabled", bool,
            "report ranks that others wait for", inverted=True),
    Setting("stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS",
            "stall_check.warning_time_seconds", _count, "wait before the report"),
    Setting("stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            "stall_check.shutdown_time_seconds", _count, "wait before the job is given up; 0: never"),
    Setting("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", "library_options.mpi_threads_disable", bool,
            "ask MPI for one thread only"),
    Setting("num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", "library_options.num_nccl_streams", _count,
            "streams for NCCL"),
    Setting("thread-affinity", "HOROVOD_THREAD_AFFINITY", "library_options.thread_affinity", str,
            "comma list: a core for the engine thread of each local rank"),
    Setting("gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", "library_options.gloo_timeout_seconds", _count,
            "limit on one network wait"),
    Setting("log-level", "HOROVOD_LOG_LEVEL", "logging.level", _level, "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL"),
    Setting("log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "logging.with_timestamp", bool,
            "time in the runtime's log lines", inverted=True, off_flag="log-without-timestamp"),
)  # fmt: skip


_METAVARS = {
    "autotune-log-file": "FILE", "timeline-filename": "FILE", "thread-affinity": "CORE,...", "log-level": "LEVEL"
}  # fmt: skip


class _Jsrun(argparse.Action):
    """A flag that is known and cannot be served: says so, rather than 'unrecognized argument'."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise NotYet(
            f"{option_string} needs LSF's own launcher, which starts ranks itself: jsrun -n N python train.py"
        )


class _Torchruns(argparse.Action):
    """A flag of torchrun's that has no meaning here: says what has."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = next(one for one in self.option_strings if one.startswith("--"))
        if flag != "--standalone" and values not in _MEANS_NOTHING.get(flag, ()):
            instead = _OF_TORCHRUN.get(flag) or _OF_TORCHRUN_ALONE[flag]
            raise LaunchError(f"{option_string} is a flag of torchrun: {instead}")


_ONE_LAUNCHER = (
    "this launcher is started once, and starts other hosts by ssh: -np 8 -H node1:4,node2:4 python train.py"
)
_FILES = "--output-filename DIR keeps the output of each rank"
_MODULE = "write python -m MODULE behind the flags"
_LEAVE_OUT = "leave it out"
_OF_TORCHRUN = {
    "--nnodes": _ONE_LAUNCHER, "--node-rank": _ONE_LAUNCHER, "--master-addr": _ONE_LAUNCHER,
    "--master-port": _ONE_LAUNCHER, "--rdzv-backend": _ONE_LAUNCHER, "--rdzv-endpoint": _ONE_LAUNCHER,
    "--rdzv-id": _ONE_LAUNCHER, "--rdzv-conf": _ONE_LAUNCHER, "--redirects": _FILES, "--tee": _FILES,
    "--max-restarts": "an elastic job starts lost workers again: -np 4 --min-np 2 python train.py",
    "--local-addr": "--network-interfaces NAME says over which network ranks connect",
    "--local-ranks-filter": "--ranks 0,3-5 shows only these ranks",
    "--shutdown-timeout": "--grace S is the time between SIGTERM and SIGKILL",
    "--monitor-interval": _LEAVE_OUT, "--role": _LEAVE_OUT, "--start-method": _LEAVE_OUT,
}  # fmt: skip
_OF_TORCHRUN_ALONE = {"--standalone": "", "--module": _MODULE, "--no-python": _LEAVE_OUT}
_SHORT = {"--redirects": "-r", "--tee": "-t", "--module": "-m"}
# What torchrun does by itself, or where one host has nothing to agree upon.
_MEANS_NOTHING: dict[str, tuple[str, ...]] = {
    "--nnodes": ("1", "1:1"), "--node-rank": ("0",), "--max-restarts": ("0",), "--redirects": ("0",), "--tee": ("0",),
    "--rdzv-backend": ("static", "c10d"), "--rdzv-endpoint": ("localhost:0", "127.0.0.1:0"),
    "--role": ("default",), "--start-method": ("spawn",),
}  # fmt: skip


def _whole(text: str, largest: int, what: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= largest:
        raise argparse.ArgumentTypeError(f"{text!r} is {what}")
    return int(text)


def _number_of_ranks(text: str) -> int | str:
    if text == "auto":
        return text
    return _whole(text, MAX_SLOTS, f"neither a whole number from 1 to {MAX_SLOTS} nor 'auto'")


def _per_host(text: str) -> int | str:
    return _number_of_ranks("auto" if text in ("gpu", "cpu", "xpu") else text)  # torchrun's words


def _positive(text: str) -> int:
    return _whole(text, MAX_SLOTS, f"not a whole number from 1 to {MAX_SLOTS}")


def _port(text: str) -> int:
    return _whole(text, 65535, "not a port, from 1 to 65535")


def _seconds(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _threads(text: str) -> str:
    if text in ("auto", "off") or (text.isdigit() and int(text) > 0):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto', 'off' nor a number")


def build_parser(program: str, defaults: Mapping[str, str] | None = None) -> Parser:
    """defaults: of the tunables, by variable, to be shown in the help."""
    parser = Parser(
        prog=program,
        summary=f"{program} -np N [-H host:slots,...] [flags] python train.py ...",
        examples=(
            ("four ranks on this machine", f"{program} -np 4 python train.py"),
            ("on two hosts, by ssh", f"{program} -np 8 -H node1:4,node2:4 python train.py"),
            ("goes on while two are left", f"{program} -np 4 --min-np 2 python train.py"),
        ),
        description="Starts one process per rank, here directly and on other hosts by ssh, and ends them together.",
        epilog="Exit code: the first failed rank's (128+N for signal N); 130 after Ctrl-C, 143 after SIGTERM.",
    )
    _add_general(parser)
    _add_elastic(parser)
    _add_output(parser)
    _add_views(parser)
    _add_mpi(parser)
    tunables = parser.add_argument_group("tunables (each sets the variable in its help for every rank)")
    for setting in SETTINGS:
        _add_setting(tunables, setting, (defaults or {}).get(setting.variable, ""))
    add = parser.add_argument
    add("--jsrun", "--use-jsrun", action=_Jsrun, nargs=0, help=argparse.SUPPRESS)
    for flag in (*_OF_TORCHRUN, *_OF_TORCHRUN_ALONE):
        names = dict.fromkeys((flag, f"--{flag[2:].replace('-', '_')}", _SHORT.get(flag, flag)))
        nargs = 0 if flag in _OF_TORCHRUN_ALONE else None
        add(*names, action=_Torchruns, nargs=nargs, help=argparse.SUPPRESS)
    add(
        "command",
        nargs=argparse.REMAINDER,
        help="what every rank runs, without a shell; train.py alone is run by this Python",
    )
    return parser


# fmt: off
def _add_general(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="num_proc", type=_number_of_ranks, metavar="N|auto",
        help="number of ranks; auto: every slot of the hosts, else one per device, else one per core")
    add("--nproc-per-node", "--nproc_per_node", dest="per_host", type=_per_host, help=argparse.SUPPRESS)
    add("--threads-per-rank", type=_threads, default=None, metavar="auto|off|N",
        help="OMP_NUM_THREADS of each rank; auto: share the cores where it is unset (default)")
    add("--start-timeout", type=_seconds, metavar="S",
        help=f"limit for all ranks to connect, in seconds (default {START_TIMEOUT_S:g})")
    add("--grace", type=_seconds, metavar="S", help="time between SIGTERM and SIGKILL, in seconds (default 30)")
    add("--config-file", metavar="FILE",
        help="YAML with the same settings (flag beats environment beats file)")
    add("--print-config", action="store_true", help="print every setting with its origin, and end")
    add("-cb", "--check-build", action="store_true", help="print what is available, and why not the rest")
    add("--verbose", action="store_true", help="say what the launcher does, and show every traceback whole")
    add("-v", "-V", "--version", action="store_true", help="print the version")
    add("--gloo", "--use-gloo", action="store_true", dest="gloo", help="accepted; the launcher never needs MPI")
    add("--disable-cache", action="store_true", help="accepted; no check of hosts is remembered")
    add = parser.add_argument_group("hosts").add_argument
    add("-H", "--hosts", "--host", metavar="HOST:SLOTS,...",
        help="hosts in order of their ranks; this one needs no ssh (default: this one)")
    add("-hostfile", "--hostfile", metavar="FILE", help="one 'host slots=N' a line")
    add("--network-interfaces", "--network-interface", metavar="NAME,...",
        help="network interfaces to connect over (default: all)")
    add("-p", "--ssh-port", type=_port, metavar="PORT", help="ssh port of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="ssh key for the other hosts")
    add("--remote-shell", choices=("ssh", "srun"),
        help="what starts the ranks of other hosts (default: srun with --host-discovery slurm, else ssh)")
    add("--remote-python", metavar="PATH",
        help="Python with horoclone on the other hosts (default: the same path as here)")
    add("--tcp", action="store_true", help="no InfiniBand for NCCL (NCCL_IB_DISABLE=1)")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("elastic jobs (one of the first four makes the job elastic)").add_argument
    add("--min-np", "--min-num-proc", type=_positive, metavar="N", dest="min_np",
        help="go on while this many ranks are left (default: -np)")
    add("--max-np", "--max-num-proc", type=_positive, metavar="N", dest="max_np",
        help="never more ranks than this (default: every slot)")
    add("--host-discovery-script", metavar="COMMAND", help="prints host:slots lines; runs every second")
    add("--host-discovery", metavar="SOURCE",
        help="file:PATH (a hostfile), slurm (the allocation), dns:NAME[:slots] (each address a host)")
    add("--slots-per-host", "--slots", type=_positive, metavar="N",
        help="slots of a host that comes without a number")
    add("--elastic-timeout", type=_seconds, metavar="S",
        help="limit for enough ranks to be there, in seconds (default 600)")
    add("--reset-limit", type=_positive, metavar="N", help="end the job after so many new beginnings")
    add("--blacklist-cooldown-range", type=_count, nargs=2, metavar=("MIN", "MAX"),
        help="how long a slot is not used after failures, in seconds (default: for ever)")
    add("--notice-script", metavar="COMMAND",
        help="runs every 5 s on each host; exit code 0: the host goes (printed: in how many seconds)")
    add("--notice-signal", metavar="USR1|USR2",
        help="a signal to a worker that means, as SIGTERM does: leave at the next commit")
    add("--spares", type=_count, metavar="N", help="workers beyond --max-np that wait for a place (default 0)")
    add("--survive-launcher", action="store_true",
        help="the ranks go on when this launcher dies, without new workers")


def _add_mpi(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("MPI").add_argument
    add("--mpi", "--use-mpi", action="store_true", dest="mpi",
        help="start the ranks with the mpirun that is on PATH (Open MPI, MPICH, Intel MPI)")
    add("--mpi-args", metavar="ARGS", help="more arguments for mpirun, in quotes; implies --mpi")
    add("--binding-args", metavar="ARGS", help="mpirun's arguments for binding, instead of none; implies --mpi")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output-filename", "--log-dir", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", "--prefix-timestamp", action="store_true",
        dest="prefix_timestamp", help="time before every line")
    add("--horovod-format", action="store_true", help="horovodrun's prefix: [1]<stdout>:")
    add("--ranks", metavar="0,3-5", help="show only these ranks (files hold all)")


def _add_views(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("live views (and in a terminal: horoclone top)").add_argument
    add("--dashboard", action="store_true", help="serve a page about the running job, and print its address")
    add("--dashboard-port", metavar="[ADDRESS:]PORT",
        help="the same, there (default: any free port, of 127.0.0.1, which only this machine reaches)")
    add("--metrics-port", metavar="[ADDRESS:]PORT",
        help="serve metrics for Prometheus there (address: 127.0.0.1 unless given; port 0: any free one)")
    add("--why", action="store_true",
        help="measure why ranks are late, and say it at the end, in horoclone top and hvd.metrics() (HOROCLONE_WHY=1)")
# fmt: on


def _add_setting(group: Any, setting: Setting, default: str) -> None:
    name = setting.flag.replace("-", "_")
    if setting.kind is bool:
        default = default and ("on" if (default not in ("0", "-1")) != setting.inverted else "off")
    elif setting.scale != 1 and default:
        default = str(int(default) // setting.scale)
    text = f"{setting.help} ({setting.variable}{default and f'; default {default}'})".replace("%", "%%")
    if setting.kind is bool:
        group.add_argument(f"--{setting.flag}", dest=name, action="store_true", default=None, help=text)
        off = setting.off_flag or f"no-{setting.flag}"
        group.add_argument(f"--{off}", dest=name, action="store_false", default=None, help=argparse.SUPPRESS)
    else:
        metavar = _METAVARS.get(setting.flag, "N" if setting.kind is _count else "X")
        group.add_argument(f"--{setting.flag}", dest=name, type=setting.kind, metavar=metavar, help=text)
    if setting.flag == "log-with-timestamp":  # horovodrun's older pair, with the opposite sense
        for flag, action in (
            ("--log-hide-timestamp", "store_false"),
            ("--no-log-hide-timestamp", "store_true"),
        ):
            group.add_argument(flag, dest=name, action=action, default=None, help=argparse.SUPPRESS)


def variable_text(setting: Setting, value: Any) -> str:
    """The text of the setting's variable for a parsed value."""
    if setting.kind is bool:
        return "1" if bool(value) != setting.inverted else "0"
    if setting.scale != 1:
        return str(int(value * setting.scale))
    return str(value)


def rank_settings(
    arguments: argparse.Namespace, file_values: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """variable -> (text, origin) of every tunable that somebody has set. file_values: place -> value."""
    found: dict[str, tuple[str, str]] = {}
    for setting in SETTINGS:
        value = getattr(arguments, setting.flag.replace("-", "_"))
        if value is not None:
            found[setting.variable] = (variable_text(setting, value), f"--{setting.flag}")
            continue
        twin = setting.variable.replace("HOROVOD_", "HOROCLONE_", 1)
        inherited = next((name for name in (twin, setting.variable) if name in environment), None)
        if inherited is not None:
            found[setting.variable] = (environment[inherited], f"environment ({inherited})")
        elif setting.place in file_values:
            found[setting.variable] = (
                variable_text(setting, file_values[setting.place]),
                f"file ({setting.place})",
            )
    return found
