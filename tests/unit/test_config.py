"""Load settings: an option is named, given its default and explained in one place, and reaches everybody from there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from outrider.cli.common import loading
from outrider.cli.main import app
from outrider.config import ENGINE, OPTIONS, EngineConfig, LoadSettings
from outrider.llm import LLM
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError

# These mean something else there, or take several.
OTHERS = {
    ("train", "dtype"),
    ("inspect", "drafter"),
    ("inspect", "quantize"),
    ("bench", "draft_tokens"),
    ("bench", "tree"),
}
# `--audio FILE` and `--image FILE` name files, so the switch of the weights has a longer name.
SWITCHES = {"audio": "--audio-weights"}


@pytest.mark.parametrize(
    "name", ["generate", "chat", "serve", "batch", "bench", "prove", "demo", "inspect", "train", "eval-drafter"]
)
def test_commands_take_name_default_and_help_from_the_settings(name: str) -> None:
    group = typer.main.get_command(app(("doctor", name)))
    options = [p for p in group.commands[name].params if p.param_type_name == "option" and p.name in OPTIONS]  # type: ignore[attr-defined]
    parameters = {p.name: p for p in options if (name, p.name) not in OTHERS}
    assert parameters
    for option, parameter in parameters.items():
        default = OPTIONS[option].default
        assert parameter.default == ([default] if parameter.multiple else default), option
        assert parameter.help == OPTIONS[option].help, option
        assert parameter.opts[0] == SWITCHES.get(option, "--" + option.replace("_", "-"))


def test_the_server_has_its_settings_from_their_fields(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options of `serve` reach its settings, and so do keys of a file."""
    told: list[ServerSettings] = []

    def listen(host: str, port: int) -> None:
        raise OutriderError(f"{host} {port}")

    made = ServerSettings.__post_init__
    monkeypatch.setattr(ServerSettings, "__post_init__", lambda self: (made(self), told.append(self))[0])
    monkeypatch.setattr("outrider.server.main.listen", listen)
    (tmp_path / "keys").write_text("alpha\nbeta\n")
    words = [
        "serve",
        "m",
        "--port",
        "7",
        "--host",
        "localhost",
        "--api-key",
        "own",
        "--api-key-file",
        str(tmp_path / "keys"),
        "--log-json",
    ]
    words += [
        "--max-queued",
        "3",
        "--idle-timeout",
        "2.5",
        "--allowed-origin",
        "http://a",
        "--allowed-origin",
        "http://b",
    ]
    with pytest.raises(OutriderError, match="localhost 7"):
        typer.main.get_command(app(("doctor", "serve")))(words, standalone_mode=False)
    got = told[-1]
    assert got.api_keys == ("own", "alpha", "beta")
    assert (got.max_queued, got.idle_timeout, got.log_json, got.timeout) == (3, 2.5, True, 600.0)
    assert got.allowed_origins == ("http://a", "http://b") and got.model_name == "m" and got.max_concurrent == 8


def test_a_command_gets_what_was_said() -> None:
    received: list[object] = []

    @loading("drafter", "draft_tokens", "threads", "kv_dtype", "gpu_memory")
    def command(word: str = "x", *, load: LoadSettings) -> None:
        received.extend((word, load))

    shell = typer.Typer()
    shell.command()(command)
    words = ["--word", "y", "--draft-tokens", "3", "--threads", "2", "--kv-dtype", "int8", "--gpu-memory", "0.5"]
    typer.main.get_command(shell)(words, standalone_mode=False)
    assert received == [
        "y",
        LoadSettings(draft_tokens="3", threads=2, engine=EngineConfig(kv_dtype="int8", gpu_memory=0.5)),
    ]
    typer.main.get_command(shell)(["--drafter", "a", "--drafter", "b"], standalone_mode=False)
    assert received[-1] == LoadSettings(drafter=("a", "b")) and LoadSettings(drafter=["a", "b"]).drafters == ("a", "b")
    with pytest.raises(OutriderError, match="--drafter may be one or two"):
        typer.main.get_command(shell)(["--drafter", "a"] * 3, standalone_mode=False)
    with pytest.raises(KeyError, match="colour"):
        loading("colour")(command)


def test_options_there_and_back() -> None:
    load = LoadSettings(draft_tokens=3, dtype="float16", engine=EngineConfig(max_context=77, gpu_memory=0.5))
    assert LoadSettings.of(load.options()) == load and LoadSettings.of({}) == LoadSettings()
    assert LoadSettings.of(LoadSettings(drafter=("a", "b")).options()).drafters == ("a", "b")
    assert (
        {*load.options()}
        == {*OPTIONS}
        >= {*ENGINE}
        == {"max_context", "kv_dtype", "gpu_memory", "prefix_store", "prefix_store_size"}
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"draft_tokens": "many"}, "draft_tokens must be a number in 0..16 or 'auto', got 'many'"),
        ({"tree": 1}, "tree must be 'auto', 'off' or a number of tokens in 2..16, got 1"),
        ({"tree": 99}, "tree must be 'auto', 'off' or a number"),
        ({"dtype": "int7"}, "unknown dtype 'int7'; known: float32, bfloat16, float16"),
        ({"quantize": "int7"}, "unknown quantize 'int7'; known: int8, int4, fp8"),
        ({"load_format": "tar"}, "unknown load_format 'tar'; known: auto, dummy"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        (
            {"tensor_parallel": 2, "engine": EngineConfig(prefix_store="x")},
            "prefix_store is for a model in one process",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(OutriderError, match=told):
        LLM.load("nowhere", **wrong)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("drafters", "unknown field 'drafters'; known: drafter"),
        ("colour", f"unknown field 'colour'; known: {', '.join(f.name for f in fields(LoadSettings))}, max_batch"),
        ("drafterr", "unknown field 'drafterr'; known: drafter"),
    ],
)
def test_a_field_that_there_is_not(field: str, told: str) -> None:
    with pytest.raises(OutriderError) as caught:
        LLM.load("nowhere", **{field: 100})
    assert str(caught.value).startswith(told)


def test_the_engines_fields_and_well_known_names() -> None:
    ours = LoadSettings(draft_tokens=4, engine=EngineConfig(max_context=77, max_batch=3, gpu_memory=0.5))
    known = {"max_model_len": 77, "max_num_seqs": 3, "gpu_memory_utilization": 0.5, "num_speculative_tokens": 4}
    assert LoadSettings().changed(known) == ours
    assert LoadSettings().changed({"max_context": 77, "max_batch": 3, "gpu_memory": 0.5, "draft_tokens": 4}) == ours
    assert LoadSettings().changed({"max_context": 77, "max_model_len": 77}).engine.max_context == 77
    with pytest.raises(
        OutriderError, match="max_context=77 and max_model_len=78 are the same setting with different values"
    ):
        LLM.load("nowhere", max_context=77, max_model_len=78)
    with pytest.raises(OutriderError, match="drafter none drafts nothing: leave out draft_tokens"):
        LLM.load("nowhere", drafter="none", num_speculative_tokens=4)


def test_well_known_options_reach_the_settings() -> None:
    received: list[LoadSettings] = []

    @loading("draft_tokens", "max_context", "gpu_memory")
    def command(*, load: LoadSettings) -> None:
        received.append(load)

    shell = typer.Typer()
    shell.command()(command)
    words = ["--max-model-len", "77", "--gpu-memory-utilization", "0.5", "--num-speculative-tokens", "4"]
    typer.main.get_command(shell)(words, standalone_mode=False)
    assert received == [LoadSettings(draft_tokens="4", engine=EngineConfig(max_context=77, gpu_memory=0.5))]


def test_an_engine_of_none_is_the_default() -> None:
    assert LoadSettings().changed({"engine": None, "drafter": "none"}) == LoadSettings(drafter="none")
    settings = LoadSettings(engine=EngineConfig(max_context=77))
    assert (
        settings.changed({"engine": None}) == settings
        and settings.changed({"engine": EngineConfig()}) == LoadSettings()
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--max-context 0", "--max-context must be at least 1, got 0"),
        ("--quantize int3", "unknown --quantize 'int3'; known: int8, int4, fp8"),
        ("--kv-dtype dtype", "unknown --kv-dtype 'dtype'; known: auto, int8, fp8"),
        (
            "--prefix-store x --tensor-parallel 2",
            "--prefix-store is for a model in one process: leave it out next to --tensor-parallel",
        ),
        ("--tree 1", "--tree must be 'auto', 'off' or a number of tokens in 2..16, got 1"),
        ("--drafter ngram --drafter auto", "two drafters are an MTP and a block one; ngram stands alone"),
        ("--memory 4", "--memory is shared by several models"),
    ],
)
def test_a_command_names_its_options_as_they_are_typed(words: str, told: str) -> None:
    with pytest.raises(OutriderError) as caught:
        typer.main.get_command(app(("doctor", "serve")))(["serve", "nowhere", *words.split()], standalone_mode=False)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"threads": "2"}, "threads must be a whole number, got '2'"),
        ({"tensor_parallel": None}, "tensor_parallel must be a whole number, got None"),
        ({"draft_tokens": 2.5}, "draft_tokens must be a number in 0..16 or 'auto', got 2.5"),
        ({"tree": [4]}, "tree must be 'auto', 'off' or a number"),
        ({"drafter": False}, "drafter must be 'auto', 'none', 'ngram' or where one is, got False"),
        ({"gpu_memory": "0.5"}, "gpu_memory must be a number, got '0.5'"),
        ({"engine": 5, "max_context": 10}, "engine must be an EngineConfig, got 5"),
        ({"ops": 5}, "ops must be a text"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"vision": "no"}, "vision must be True or False, got 'no'"),
        ({"prefix_cache": "no"}, "prefix_cache must be True or False, got 'no'"),
        ({"graphs": "off"}, "graphs must be True or False, got 'off'"),
        ({"prefix_store": ""}, "prefix_store must name a folder, got ''"),  # else the working folder, made private
        ({"prefix_store": 5}, "prefix_store must name a folder, got 5"),
        ({"kv_tokens": 1.5}, "kv_tokens must be a whole number, got 1.5"),
        ({"kv_tokens": 20}, "kv_tokens must be more than page_size (32), got 20"),
        ({"engine": {"max_context": 10}}, "engine must be an EngineConfig, got {'max_context': 10}"),
    ],
)
def test_values_of_another_type_are_one_line(given: dict[str, object], says: str) -> None:
    with pytest.raises(OutriderError, match=re.escape(says)):
        LoadSettings().changed(given)
    with pytest.raises(OutriderError, match="max_context must be a whole number, got '10'"):
        EngineConfig(max_context="10")  # type: ignore[arg-type]
    assert LoadSettings(drafter=Path("a") / "b").drafter == "a/b"  # type: ignore[arg-type]
