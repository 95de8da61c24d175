"""Digests of a drafter's training prompts, in its provenance.json: its results on them are too good."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ..prompts import Prompt
from .data import file_hash
from .export import Json, read_json

DIGEST_BYTES = 5  # among 10^5 prompts, two share a digest with probability 0.5 %
FIELD = "prompt_digests"  # in provenance.json


def prompt_digest(prompt: Prompt) -> str:
    return blake2b(prompt.text.strip().encode(), digest_size=DIGEST_BYTES).hexdigest()


def pack(digests: Iterable[str]) -> str:
    """Sorted digests as one text."""
    return base64.b64encode(bytes.fromhex("".join(sorted(set(digests))))).decode()


def unpack(text: str) -> set[str]:
    digits = base64.b64decode(text).hex()
    width = 2 * DIGEST_BYTES
    return {digits[start : start + width] for start in range(0, len(digits), width)}


@dataclass(frozen=True)
class Overlap:
    """Overlap of an evaluation's prompts with those of the training."""

    trained_on: list[bool] | None  # per prompt; None: unknown from the drafter's folder
    same_file: bool  # the prompts come from the file of the training

    @property
    def count(self) -> int | None:
        return None if self.trained_on is None else sum(self.trained_on)


def training_overlap(drafter: Path, prompts: Sequence[Prompt], file: Path) -> Overlap:
    """Compares prompts with the provenance of a drafter's folder."""
    provenance = read_json(drafter / "provenance.json") if drafter.is_dir() else {}
    runs: list[Json] = provenance.get("runs", [provenance])
    packed = [run[FIELD] for run in runs if FIELD in run]
    hashes = {provenance.get("data_sha256"), *(run.get("data_sha256") for run in runs)} - {None}
    same_file = bool(hashes) and file.is_file() and file_hash(file) in hashes
    if not packed:
        return Overlap(trained_on=None, same_file=same_file)
    digests = set().union(*map(unpack, packed))
    return Overlap([prompt_digest(prompt) in digests for prompt in prompts], same_file)
