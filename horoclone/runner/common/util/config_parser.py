"""Under Horovod's name: horovodrun's settings between the YAML file, its arguments and the ranks' variables.

One table holds for this and for horoclonerun: horoclone.launch.options.SETTINGS. HOROVOD_<...> of every setting is a
constant here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import Any

from horoclone.launch.options import SETTINGS, Setting, variable_text

globals().update({setting.variable: setting.variable for setting in SETTINGS})
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"
HOROVOD_CCL_BGT_AFFINITY = "HOROVOD_CCL_BGT_AFFINITY"  # of oneCCL; nobody reads it here
LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]


def _attribute(setting: Setting) -> str:
    """The name in horovodrun's parsed arguments."""
    return "no_stall_check" if setting.flag == "stall-check" else setting.flag.replace("-", "_")


def set_args_from_config(args: Any, config: Mapping[str, Any], override_args: Container[str]) -> None:
    """Puts what a YAML file says (as a dict of sections) into `args`, except what override_args names: those were given
    on the command line. ValueError for a controller that does not exist."""
    controller = config.get("controller")
    if controller and not args.use_gloo and not args.use_mpi:
        if str(controller).lower() not in ("gloo", "mpi"):
            raise ValueError(f"No such controller supported: {controller}")
        setattr(args, f"use_{str(controller).lower()}", True)
    for setting in SETTINGS:
        section, _, key = setting.place.partition(".")
        value = (config.get(section) or {}).get(key)
        name = _attribute(setting)
        if value is not None and name not in override_args:
            setattr(args, name, not value if name == "no_stall_check" else value)


def validate_config_args(args: Any) -> None:
    """ValueError for a number below zero, and for autotune_gaussian_process_noise above 1."""
    for setting in SETTINGS:
        name = _attribute(setting)
        value = getattr(args, name, None)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name == "autotune_gaussian_process_noise" and not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must be in [0, 1]")
        if value < 0:
            raise ValueError(f"{name}={value} must be >= 0")


def set_env_from_args(env: MutableMapping[str, str], args: Any) -> MutableMapping[str, str]:
    """Adds to `env` the variable of everything that is set in `args`; returns env. What belongs to autotune and to the
    timeline counts only where args.autotune and args.timeline_filename are set, as in Horovod."""
    for setting in SETTINGS:
        name = _attribute(setting)
        value = getattr(args, name, None)
        section = setting.place.partition(".")[0]
        if (
            value is None
            or (section == "autotune" and not args.autotune)
            or (section == "timeline" and not args.timeline_filename)
        ):
            continue
        env[setting.variable] = variable_text(setting, not value if name == "no_stall_check" else value)
    if getattr(args, "tcp_flag", None):
        env[NCCL_IB_DISABLE] = "1"
    return env
