"""Folders of a user's files: the cache and the configuration."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """The folder of everything kept between runs: OUTRIDER_CACHE, else the system's cache folder (XDG_CACHE_HOME or
    ~/.cache on Linux, ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows). For a user without a home, as in a
    container with a numeric user: `spare_root`."""
    configured = os.environ.get("OUTRIDER_CACHE")
    if configured:
        return Path(configured)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(_caches())
    return spare_root() if caches.startswith("~") else Path(caches, "outrider")


def _caches() -> str:
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    return "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"


def config_file() -> Path:
    """The user's config.toml: in XDG_CONFIG_HOME, %APPDATA% on Windows, else ~/.config (also on macOS, like other
    command line programs)."""
    appdata = os.environ.get("APPDATA") if sys.platform == "win32" else None
    folder = os.environ.get("XDG_CONFIG_HOME") or appdata or "~/.config"
    return Path(os.path.expanduser(folder), "outrider", "config.toml")


def spare_root() -> Path:
    """The fallback if the cache is not writable: this user's own folder in the temporary directory."""
    if not hasattr(os, "getuid"):  # Windows: each user has a temporary directory
        folder = Path(tempfile.gettempdir()) / "outrider"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OSError(errno.EPERM, f"{folder} belongs to someone else")
    return folder


def writable(root: Path) -> bool:
    """True if a file can be created there. Tries it, since permissions do not show read-only mounts and full disks."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(4096))
    except OSError:
        return False
    return True
