"""Checkpoints: resolve a name to files, read the files, load the weights."""

from . import hub
from .files import Files, fingerprint, text_files
from .load import check_shares, load_drafter, load_target

__all__ = ["Files", "check_shares", "fingerprint", "hub", "load_drafter", "load_target", "text_files"]
