"""A drafter by its name: found, loaded and checked against the target that it drafts for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..config import LoadSettings
from ..models.block_config import is_block
from ..models.decoder import TextModel
from ..models.drafter import MTPNet
from ..ops.formats import DeviceWeight
from ..types import OutriderError
from ..weights import hub
from ..weights.files import Files, check_draft_model, fingerprint
from ..weights.load import load_drafter, load_target
from . import acceptance as cards
from . import draft_model
from .block import BlockDrafter, load_block
from .draft_model import DraftModel
from .drafter import Drafter, DrafterOrigin, DrafterPair
from .mtp import MTPDrafter

TokenIds = Callable[[], Iterable[int]]


def pick_drafter(
    model: Files, settings: LoadSettings, target: TextModel, *, dtype: torch.dtype, always: TokenIds = tuple
) -> PickedDrafter:
    """The drafter that the settings name. always: tokens that a draft model scores whatever their index in the
    vocabulary."""
    loader = DrafterLoader(model, settings, target, dtype=dtype, always=always)
    picks = [loader.pick(name) for name in settings.drafters]
    networks = [pick for pick in picks if pick.drafter is not None]
    drafter = networks[0].drafter if networks else None
    note = networks[0].note if networks else picks[0].note
    if len(networks) == 2:
        first, second = networks
        assert first.drafter is not None and second.drafter is not None
        drafter = DrafterPair(first.drafter, second.drafter)
        note = f"{first.note} and {second.note.removeprefix('drafter: ')}"
    members = drafter.members if drafter is not None else ()
    if settings.quantize_drafter is not None and not any(member.kv_specs for member in members):
        raise OutriderError(f"--quantize-drafter rounds a block drafter (DFlash, DSpark, EAGLE-3); {note}")
    return PickedDrafter(drafter, note)


class PickedDrafter(NamedTuple):
    drafter: Drafter | None  # None: no network drafts
    note: str  # a line for the user: which drafter is used, and why


@dataclass(frozen=True)
class DrafterLoader:
    """Loads drafters for one target."""

    model: Files
    settings: LoadSettings
    target: TextModel
    dtype: torch.dtype
    always: TokenIds  # tokens that a draft model scores whatever their index in the vocabulary

    def pick(self, name: str) -> PickedDrafter:
        """name: as `LoadSettings.drafter` has it."""
        if name == "none":
            return PickedDrafter(None, "drafter: none (plain decoding)")
        if name == "ngram":
            return PickedDrafter(None, "drafter: ngram (suffix matches in prompt and answer)")
        where: str | None = name
        reason = "as asked"
        if name == "auto":
            where, reason = hub.auto_drafter(self.model, [str(path) for path in self.settings.adapters.values()])
        if where is None:
            return PickedDrafter(None, f"drafter: ngram ({reason})")
        try:
            return self.load(where, reason)
        except OutriderError as error:
            if name == "auto":
                return PickedDrafter(None, f"drafter: ngram ({where} cannot be used: {error})")
            is_path = "/" in name or Path(name).exists()
            kinds = "" if is_path else " (a drafter may also be auto, none, ngram or draft:MODEL)"
            raise OutriderError(f"{error}{kinds}") from None

    def load(self, where: str, reason: str) -> PickedDrafter:
        """The drafter of a checkpoint, whatever its kind: a name or a path, or draft:MODEL."""
        if where.startswith("draft:"):
            return self._draft_model(where, reason)
        files = hub.resolve(where, kind="drafter", weights=self.settings.load_format == "auto")
        if files.config.get("model_type") == "medusa":
            kinds = "a drafter is an MTP, DFlash, DSpark or EAGLE-3 one, or draft:MODEL"
            raise OutriderError(f"{where} has Medusa heads; {kinds}")
        return self._block(files, where, reason) if is_block(files.config) else self._mtp(files, where, reason)

    def _draft_model(self, where: str, reason: str) -> PickedDrafter:
        ops = self.target.ops
        name = where.removeprefix("draft:")
        rounded_names: list[str] = []

        def cheaper(part: str, weight: DeviceWeight) -> DeviceWeight:
            """A draft need not be exact: quantised, but for the embedding, of which a step reads one row."""
            rounded = weight if part == "embed" or len(weight.shape) < 2 else ops.coarse(weight)
            if rounded is not weight:
                rounded_names.append(part)
            return rounded

        vocab = check_draft_model(self.model, hub.resolve(name, weights=False))
        config, weights, _ = load_target(
            name,
            self.target.device,
            self.dtype,
            ops=ops,
            load_format=self.settings.load_format,
            seed=self.settings.seed,
            keep=cheaper,
        )
        listed = None
        if ops.capabilities.shortlists:
            listed = draft_model.shortlist(vocab, self.always(), padded=vocab < config.vocab_size)
        details = [reason]
        if rounded_names:
            details.append("its weights rounded to 4 bits")
        if listed is not None:
            details.append(f"{len(listed):,} of {config.vocab_size:,} tokens scored")
        drafter = DraftModel(
            ops.compile(TextModel(config, weights, ops)),
            listed,
            self.target.config.vocab_size,
            origin=DrafterOrigin(where),
        )
        return PickedDrafter(drafter, f"drafter: draft model {name} ({'; '.join(details)})")

    def _block(self, files: Files, where: str, reason: str) -> PickedDrafter:
        settings = self.settings
        mode = settings.quantize_drafter or settings.quantize
        block = load_block(
            files, self.target, self.dtype, load_format=settings.load_format, seed=settings.seed, quantize=mode
        )
        origin = DrafterOrigin(where)
        profile = None
        if settings.load_format == "auto":
            origin = DrafterOrigin(where, content=f"{fingerprint(files)} {mode}")
            profile = cards.read(Path(files.path), fingerprint(files))
        drafter = BlockDrafter(block, origin=origin, profile=profile)
        rounded = "" if mode is None else f"; weights rounded to {mode}"
        return PickedDrafter(drafter, f"drafter: {drafter.name} {where} ({reason}{rounded})")

    def _mtp(self, files: Files, where: str, reason: str) -> PickedDrafter:
        settings = self.settings
        target = self.target
        ops = target.ops
        tp = target.together.tp
        config, weights = load_drafter(
            files,
            target.device,
            self.dtype,
            ops=ops,
            quantize=ops.capabilities.draft_format,
            load_format=settings.load_format,
            seed=settings.seed,
            tp=tp,
        )
        misfit = config.misfit(target.config)
        if misfit is not None:
            raise OutriderError(f"drafter {where} does not fit {target.config.model_type}: {misfit}")
        net = MTPNet(config, weights, ops, target=target)
        profile = None
        warning = None
        if settings.load_format == "auto":
            profile = cards.read(Path(files.path), fingerprint(files))
            warning = other_weights(self.model.name, where, config.target_hash, is_now=fingerprint(self.model))
        drafter = MTPDrafter(
            ops.compile_drafter(net) if tp.world == 1 else net,
            target,
            origin=DrafterOrigin(where, trained_for=config.target_hash),
            profile=profile,
        )
        warned = "" if warning is None else f"; {warning}"
        return PickedDrafter(drafter, f"drafter: mtp {where} ({reason}{warned})")


def other_weights(target: str, drafter: str, trained_for: str | None, is_now: str) -> str | None:
    """A warning if a drafter was trained for other weights of the model. Our own hold the hash of their target;
    Google's tell by name (a QAT target wants the QAT assistant)."""
    if trained_for is not None:
        if trained_for.partition("+")[0] == is_now:  # after the plus: the hash of an adapter
            return None
        return "trained for other weights of this model, so expect fewer accepted drafts"
    names = [Path(name).name.lower() for name in (target, drafter)]
    first, second = ("qat" in re.split(r"[-_.]", name) for name in names)
    if first == second or not all("gemma" in name for name in names):  # a folder called otherwise says nothing
        return None
    which = "target" if first else "drafter"
    return f"the {which} is quantisation-aware (QAT), the other is not: drafts may hardly ever be accepted"
