"""--config-file: YAML with horovodrun's sections, and the launcher's own flags by name at the top level.

The sections are params, autotune, timeline, stall_check, library_options, logging and elastic.
"""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from horoclone.launch.hosts import MAX_SLOTS
from horoclone.launch.numbers import LONGEST_S
from horoclone.launch.options import SETTINGS, Setting
from horoclone.launch.usage import LaunchError, NotYet

MAX_PORT = 65535
# Flags of the launcher itself that a file may set: name at the top level -> expected types.
LAUNCHER_KEYS: dict[str, tuple[type, ...]] = {
    "num_proc": (int, str),
    "hosts": (str,),
    "hostfile": (str,),
    "start_timeout": (int, float),
    "grace": (int, float),
    "network_interfaces": (str,),
    "ssh_port": (int,),
    "ssh_identity_file": (str,),
    "remote_python": (str,),
    "threads_per_rank": (int, str),
    "output_filename": (str,),
    "prefix_timestamp": (bool,),
    "horovod_format": (bool,),
    "ranks": (int, str),
    "verbose": (bool,),
    "tcp": (bool,),
    "dashboard": (bool,),
    "dashboard_port": (int, str),
    "metrics_port": (int, str),
    "why": (bool,),
    "mpi_args": (str,),
    "binding_args": (str,),
}
# Keys of the section `elastic` -> (flag, expected types); the same without the section.
ELASTIC_KEYS: dict[str, tuple[str, tuple[type, ...]]] = {
    "min_np": ("min_np", (int,)),
    "min_num_proc": ("min_np", (int,)),
    "max_np": ("max_np", (int,)),
    "max_num_proc": ("max_np", (int,)),
    "host_discovery_script": ("host_discovery_script", (str,)),
    "host_discovery": ("host_discovery", (str,)),
    "slots": ("slots_per_host", (int,)),
    "slots_per_host": ("slots_per_host", (int,)),
    "elastic_timeout": ("elastic_timeout", (int, float)),
    "reset_limit": ("reset_limit", (int,)),
    "blacklist_cooldown_range": ("blacklist_cooldown_range", (list,)),
    "spares": ("spares", (int,)),
    "notice_script": ("notice_script", (str,)),
    "notice_signal": ("notice_signal", (str,)),
    "survive_launcher": ("survive_launcher", (bool,)),
}
_OLD_PLACES = {"logging.hide_timestamp": "logging.with_timestamp"}


def load(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(launcher flags by name, tunables by place). LaunchError for what cannot be read or is not known."""
    try:
        import yaml
    except ImportError:
        raise LaunchError("--config-file needs PyYAML: pip install pyyaml") from None
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--config-file {path}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise LaunchError(f"--config-file {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise LaunchError(f"--config-file {path}: expected 'section:' and 'key: value' lines")
    return _sorted_out(path, content)


def _sorted_out(path: str, content: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    by_place = {setting.place: setting for setting in SETTINGS}
    sections = {place.partition(".")[0] for place in by_place}
    flags: dict[str, Any] = {}
    tunables: dict[str, Any] = {}
    for raw, value in content.items():
        key = str(raw).replace("-", "_")
        if value is None:
            continue
        if key == "controller":
            if str(value).lower() not in ("gloo", "mpi"):
                raise NotYet(f"{path}: controller: {value} is not what this launcher does; gloo or mpi are")
            flags["mpi"] = str(value).lower() == "mpi"
        elif key == "elastic" and isinstance(value, dict):
            flags |= _elastic(path, value)
        elif key in sections and isinstance(value, dict):
            for name, one in value.items():
                place = f"{key}.{str(name).replace('-', '_')}"
                if one is None:
                    continue
                if place in _OLD_PLACES:
                    place, one = _OLD_PLACES[place], not one
                if place not in by_place:
                    raise _unknown(path, place, [*by_place])
                tunables[place] = _checked(path, place, one, by_place[place])
        elif key in LAUNCHER_KEYS:
            is_word = key == "num_proc" and isinstance(value, str) and value != "auto"
            if is_word or not _is_right(LAUNCHER_KEYS[key], value, 1 if key == "num_proc" else 0):
                names = " or ".join(kind.__name__ for kind in LAUNCHER_KEYS[key])
                raise LaunchError(f"{path}: {key}: expected {names}, found {value!r}")
            flags[key] = value
        else:
            raise _unknown(path, key, [*sections, "elastic", *LAUNCHER_KEYS])
    return flags, tunables


def _is_right(kinds: tuple[type, ...], value: Any, least: int) -> bool:
    """Whether it is one of these kinds, and a number of it neither too small nor endless."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        return bool in kinds and isinstance(value, bool)
    most = LONGEST_S if float in kinds else MAX_PORT if least == 0 else MAX_SLOTS
    return not isinstance(value, (int, float)) or least <= value <= most


def _elastic(path: str, section: dict[Any, Any]) -> dict[str, Any]:
    flags = {}
    for raw, value in section.items():
        key = str(raw).replace("-", "_")
        if key not in ELASTIC_KEYS:
            raise _unknown(path, f"elastic.{key}", [f"elastic.{one}" for one in ELASTIC_KEYS])
        flag, kinds = ELASTIC_KEYS[key]
        is_range = isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value)
        least = 0 if key in ("spares", "elastic_timeout") else 1
        if not (is_range if kinds == (list,) else _is_right(kinds, value, least)):
            expected = "[min, max]" if kinds == (list,) else " or ".join(kind.__name__ for kind in kinds)
            raise LaunchError(f"{path}: elastic.{key}: expected {expected}, found {value!r}")
        flags[flag] = value
    return flags


def _checked(path: str, place: str, value: Any, setting: Setting) -> Any:
    if setting.kind is bool:
        if not isinstance(value, bool):
            raise LaunchError(f"{path}: {place}: expected true or false, found {value!r}")
        return value
    try:
        return setting.kind(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise LaunchError(f"{path}: {place}: {error}") from None


def _unknown(path: str, key: str, known: list[str]) -> LaunchError:
    near = difflib.get_close_matches(key, known, 1)
    meant = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
    return LaunchError(f"{path}: {key!r} is not a setting{meant}")
