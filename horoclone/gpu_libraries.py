"""Where pip's packages have put NVIDIA's libraries. Standard library only; nothing is imported or loaded."""

from __future__ import annotations

import importlib.util
import os


def nccl_folders() -> list[str]:
    """Folders of pip's packages (nvidia-nccl-cu12, nvidia-nccl-cu13) that hold libnccl.so.2."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    places = (
        [os.path.join(place, "nccl", "lib") for place in (spec.submodule_search_locations or [])]
        if spec
        else []
    )
    return [folder for folder in places if os.path.exists(os.path.join(folder, "libnccl.so.2"))]


def with_libraries(settings: dict[str, str]) -> dict[str, str]:
    """The settings, with pip's folders among them unless they are set."""
    if "HOROCLONE_NCCL_FOLDERS" not in settings and (folders := nccl_folders()):
        settings = {**settings, "HOROCLONE_NCCL_FOLDERS": ":".join(folders)}
    return settings
