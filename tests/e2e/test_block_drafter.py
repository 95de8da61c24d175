"""A block drafter from a folder, as a user has it: `LLM.load(model, drafter=FOLDER)` on the CPU kernels and on the
reference ones; the text is that of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import tiny
from tests.block_drafters import LAYOUTS, tensors, write

from outrider.engine.grammar import AllowedTokens
from outrider.llm import LLM
from outrider.types import OutriderError, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target("gemma4_e2b", tmp_path_factory.mktemp("target"))


def folder(path: Path, layout: str) -> Path:
    raw = {**LAYOUTS[layout], "vocab_size": 288}
    if "transformer_layer_config" in raw:
        raw["transformer_layer_config"] = {**raw["transformer_layer_config"], "vocab_size": 288}
    return write(path, raw, tensors(raw))


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("layout", ["z-lab", "dspark", "speculators-eagle3"])
def test_loaded_and_run(model: Path, tmp_path: Path, layout: str, ops: str) -> None:
    plain = LLM.load(str(model), drafter="none", ops=ops, max_context=256)
    drafted = LLM.load(str(model), drafter=str(folder(tmp_path, layout)), draft_tokens=4, ops=ops, max_context=256)
    kind = "eagle3" if "eagle" in layout else "dflash" if layout == "z-lab" else layout
    assert drafted.drafter_note.startswith(f"drafter: {kind} ")
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=3)):
        want, got = (llm.generate(["Hello there", "a b a b a b"], params) for llm in (plain, drafted))
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
        assert all(c.stats.drafted and c.stats.drafter_off is None for c in got)
    for name in ("oracle", "mtp"):  # there is none, it is not loaded
        with pytest.raises(OutriderError, match=f"one that is loaded \\('{kind}', 'ngram'\\), got '{name}'"):
            drafted.generate("x", drafter=name)
    with pytest.raises(OutriderError, match="there is none"):
        plain.generate("x", drafter="ngram")
    assert drafted.generate("x", SamplingParams(max_tokens=3), drafter=kind)[0].stats.drafted


@pytest.mark.parametrize("drafter", ["auto", "none", "ngram"])
def test_rounding_a_block_drafter_that_is_not_there_is_refused(model: Path, drafter: str) -> None:
    with pytest.raises(OutriderError, match=r"--quantize-drafter rounds a block drafter .*; drafter: "):
        LLM.load(str(model), drafter=drafter, quantize_drafter="int8")


def test_the_controller_chooses_k(model: Path, tmp_path: Path) -> None:
    drafted = LLM.load(str(model), drafter=str(folder(tmp_path, "dspark")), ops="reference", max_context=256)
    plain = LLM.load(str(model), drafter="none", ops="reference", max_context=256)
    params = SamplingParams(max_tokens=32)
    assert drafted.generate("Hello", params)[0].text == plain.generate("Hello", params)[0].text


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_assistant("gemma4_e2b", tmp_path_factory.mktemp("assistant"))


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_two_drafters(model: Path, assistant: Path, tmp_path: Path, ops: str) -> None:
    """K by the controller, and given; each by its name; trees; the text stays."""
    block = folder(tmp_path, "z-lab")
    plain = LLM.load(str(model), drafter="none", ops=ops, max_context=256)
    both = LLM.load(str(model), drafter=[assistant, block], ops=ops, max_context=256)  # type: ignore[list-item]
    assert both.drafter_note == f"drafter: mtp {assistant} (as asked) and dflash {block} (as asked)"
    assert both.engine.controller.drafters == ("mtp", "dflash", "ngram")
    assert not both.engine.controller.cost.free("mtp") and not both.engine.controller.cost.free("dflash")
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=3)):
        want = [c.token_ids for c in plain.generate(["Hello there", "a b a b a b"], params)]
        for options in (
            {},
            {"draft_tokens": 4},
            {"draft_tokens": 3, "drafter": "dflash"},
            {"draft_tokens": 3, "tree": 8},
        ):
            completions = both.generate(["Hello there", "a b a b a b"], params, **options)  # type: ignore[arg-type]
            assert [c.token_ids for c in completions] == want, options
    drafted = both.engine.metrics.drafted_by_drafter
    assert drafted["mtp"] > 0 and drafted["dflash"] > 0 and both.engine.metrics.drafter_failures == 0


def test_bad_drafters_are_one_line(model: Path, assistant: Path, tmp_path: Path) -> None:
    wrong = write(tmp_path / "wrong", LAYOUTS["z-lab"], tensors(LAYOUTS["z-lab"]))
    right = [folder(tmp_path / name, "z-lab") for name in "ab"]
    medusa = write(tmp_path / "medusa", {"model_type": "medusa", "medusa_num_heads": 2}, {})
    for drafters, message in (
        ((assistant, wrong), "vocabulary has 64 tokens, the target's 288"),
        ((assistant, tmp_path / "none"), "none"),
        (right, "two drafters are an MTP and a block drafter .*, got dflash and dflash"),
        ((assistant, *right), "drafter may be one or two .*, got 3"),
        ((assistant, "ngram"), "an MTP and a block one; ngram stands alone"),
        (("draft:smollm2", assistant), "draft:smollm2 stands alone"),
        ((assistant, assistant), "these are the same"),
        ((medusa,), "has Medusa heads; a drafter is an MTP, DFlash, DSpark or EAGLE-3 one, or draft:MODEL"),
    ):
        with pytest.raises(OutriderError, match=message) as caught:
            LLM.load(str(model), drafter=[str(one) for one in drafters], ops="reference", max_context=256)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["eagle3", "z-lab", "speculators-dflash"])
def test_a_drafter_is_no_model(tmp_path: Path, layout: str) -> None:
    """An EAGLE-3 drafter's model_type is its target's: it would be run as a Llama of one layer."""
    with pytest.raises(OutriderError, match="is a drafter, not a target: pass it with --drafter"):
        LLM.load(str(folder(tmp_path, layout)))


def test_a_mismatch_is_one_line(model: Path, tmp_path: Path) -> None:
    wrong = write(tmp_path, LAYOUTS["z-lab"], tensors(LAYOUTS["z-lab"]))
    with pytest.raises(OutriderError, match="vocabulary has 64 tokens, the target's 288") as caught:
        LLM.load(str(model), drafter=str(wrong))
    assert "\n" not in str(caught.value)


def test_kv_that_no_kernel_reads_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    """The drafter's heads of 8 are no multiple of 16; a server would fail with its first request."""
    where = str(folder(tmp_path, "z-lab"))
    with pytest.raises(OutriderError, match="K/V in int8 needs pages and heads of multiples of 16"):
        LLM.load(str(model), drafter=where, draft_tokens=4, ops="cpu", kv_dtype="int8", dtype="bfloat16")


def test_kv_on_disk_belongs_to_the_drafter(model: Path, assistant: Path, tmp_path: Path) -> None:
    """A drafter trained again in the same folder must not draft after the context of the one before."""
    block = folder(tmp_path / "block", "z-lab")
    text = "a b c " * 20
    disk = str(tmp_path / "disk")
    hits = []
    for seed, drafter in ((0, block), (0, block), (1, block), (1, [assistant, block]), (1, [assistant, block])):
        raw = json.loads((block / "config.json").read_text())
        write(block, raw, tensors(raw, seed))
        llm = LLM.load(str(model), drafter=drafter, draft_tokens=2, ops="cpu", max_context=256, prefix_store=disk)
        llm.generate(text, SamplingParams(max_tokens=2))
        assert llm.engine.store.disk is not None
        llm.engine.store.disk.flush()
        hits.append(llm.engine.metrics.prefix_pages_read > 0)
    assert hits == [False, True, False, True, True]


@pytest.mark.parametrize("layout", ["dspark", "speculators-dflash", "dflash2"])
def test_rounded_drafters_change_no_text(model: Path, tmp_path: Path, layout: str) -> None:
    """Tables stay as they are: a rounded codebook could not be looked up."""
    plain = LLM.load(str(model), drafter="none", ops="cpu", max_context=256)
    where = str(folder(tmp_path, layout))
    drafted = LLM.load(str(model), drafter=where, draft_tokens=4, ops="cpu", quantize_drafter="int8", max_context=256)
    assert "rounded to int8" in drafted.drafter_note
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=3)
    want, got = (llm.generate("Hello there", params)[0] for llm in (plain, drafted))
    assert got.token_ids == want.token_ids and got.stats.drafted and got.stats.drafter_off is None


@pytest.mark.parametrize(("layout", "ops"), [("z-lab", "reference"), ("dspark", "cpu")])
def test_stop_strings_and_grammars(model: Path, tmp_path: Path, layout: str, ops: str) -> None:
    """A stop string that ends inside a draft, and a grammar that drafts leave: chains and trees."""
    plain = LLM.load(str(model), drafter="none", ops=ops, max_context=256)
    drafted = LLM.load(str(model), drafter=str(folder(tmp_path, layout)), draft_tokens=4, ops=ops, max_context=256)
    for temperature in (0.0, 1.0):
        whole = plain.generate("Hello there", SamplingParams(max_tokens=32, temperature=temperature, seed=5))[0].text
        stops = tuple(dict.fromkeys((whole[12:14], whole[5:6], whole[-3:])))
        cases = [SamplingParams(max_tokens=32, temperature=temperature, seed=5, stop=(s,)) for s in stops if s]
        cases.append(
            SamplingParams(max_tokens=24, temperature=temperature, seed=5, grammar=AllowedTokens(range(30, 90), 288))
        )
        for params in cases:
            want = plain.generate("Hello there", params)[0]
            for tree in (None, 8):
                got = drafted.generate("Hello there", params, tree=tree)[0]
                assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
                assert got.stats.drafter_off is None
