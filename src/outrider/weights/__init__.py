"""Checkpoints: names become files, files become weights."""

from . import hub
from .files import Files, fingerprint, text_files
from .load import check_shares, load_drafter, load_target

__all__ = ["Files", "check_shares", "fingerprint", "hub", "load_drafter", "load_target", "text_files"]
