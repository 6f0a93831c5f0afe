"""Where pip's packages have put NVIDIA's libraries. Standard library only; nothing is imported or loaded."""

from __future__ import annotations

import importlib.util
import os


def _folders(inside: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    roots = (spec.submodule_search_locations or []) if spec else []
    places = [os.path.join(root, *name.split("/")) for root in roots for name in inside]
    return [folder for folder in places if any(os.path.exists(os.path.join(folder, file)) for file in files)]


def nccl_folders() -> list[str]:
    """Folders of pip's packages (nvidia-nccl-cu12, nvidia-nccl-cu13) that hold libnccl.so.2."""
    return _folders(("nccl/lib",), ("libnccl.so.2",))


def nvrtc_folders() -> list[str]:
    """Folders of pip's packages (nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12) that hold NVRTC."""
    return _folders(("cu13/lib", "cuda_nvrtc/lib"), ("libnvrtc.so.13", "libnvrtc.so.12"))


def with_libraries(settings: dict[str, str]) -> dict[str, str]:
    """The settings, with pip's folders among them unless they are set."""
    for name, folders_of in (
        ("HOROCLONE_NCCL_FOLDERS", nccl_folders),
        ("HOROCLONE_NVRTC_FOLDERS", nvrtc_folders),
    ):
        if name not in settings and (folders := folders_of()):
            settings = {**settings, name: ":".join(folders)}
    return settings
