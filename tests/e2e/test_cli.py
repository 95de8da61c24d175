"""The command line as a user meets it, on a tiny Gemma 4 with its assistant beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.kernels import put_kernels
from tests.lora import write_adapter

from outrider.bench.prove import block_logits
from outrider.cli.main import main
from outrider.config import LoadSettings
from outrider.llm import LLM
from outrider.train.target import describe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write_target("gemma4_31b", folder)
    put_kernels(folder.parent / "cache")
    tiny.write_assistant("gemma4_31b", folder.with_name("tiny-assistant"), clustered=True)
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Any:
    monkeypatch.setenv("OUTRIDER_CACHE", str(model.parent / "cache"))  # one for all: measured costs are kept there

    def call(*arguments: object, stdin: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
            raise SystemExit(0)
        code = exit.value.code
        captured = capsys.readouterr()
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return call


STATS = {
    "prompt_tokens", "new_tokens", "ttft_ms", "decode_s", "decode_tps", "cycles", "drafted", "accepted",
    "tokens_per_cycle",
    "accepted_by_position",
}  # fmt: skip


def test_generate_json_and_compare(cli: Any, model: Path) -> None:
    code, out, _ = cli(
        "generate",
        model,
        "Hello there",
        "--max-tokens",
        24,
        "--draft-tokens",
        5,
        "--json",
        "--compare",
        "--seed",
        3,
        "--temperature",
        0.9,
    )
    row = json.loads(out)
    assert code == 0 and row["identical"] is True and row["plain"]["token_ids"] == row["token_ids"]
    assert set(row["stats"]) >= STATS and row["stats"]["drafted"] > 0 and row["speedup"] > 0
    assert row["plain"]["stats"]["drafted"] == 0 and row["finish_reason"] in ("stop", "length")
    assert row["runs"] == 3


def test_the_beside_assistant_is_found_and_said_once(cli: Any, model: Path) -> None:
    _, _, err = cli("generate", model, "Hi", "--max-tokens", 4)
    assert err.count("drafter: mtp") == 1 and "tiny-assistant" in err


@pytest.mark.parametrize("drafter", ["ngram", "draft:MODEL"])
def test_drafters_without_an_assistant_start_twice(cli: Any, model: Path, drafter: str) -> None:
    for _ in range(2):
        code, out, err = cli(
            "generate", model, "Hi", "--max-tokens", 6, "--drafter", drafter.replace("MODEL", str(model)), "--json"
        )
        assert code == 0 and json.loads(out)["stats"]["new_tokens"] > 0, err


def test_text_and_statistics(cli: Any, model: Path) -> None:
    code, out, err = cli("generate", model, "Hello", "--max-tokens", 12, "--compare")
    assert code == 0 and out.strip() and "tok/s" in err and "identical: yes" in err
    assert "the fastest of 3 runs each" in err.replace("\n", " ")


def test_demo_repeats_its_contestants(cli: Any, model: Path) -> None:
    code, out, _ = cli("demo", model, "--max-tokens", 6)
    assert code == 0 and out.count(">>>") == 4 and "the fastest of 3 runs" in " ".join(out.split())


def test_a_file_of_prompts(cli: Any, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 7, "prompt": "one"}\n\n{"turns": ["two", "three"], "category": "c"}\n')
    code, out, _ = cli("generate", model, "--prompts", file, "--max-tokens", 6)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and rows[0]["id"] == 7 and rows[1]["category"] == "c" and len(rows[1]["turns"]) == 2


def test_a_prompt_that_cannot_be_answered_is_named(cli: Any, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n' + json.dumps({"prompt": "x" * 9999}) + "\n")
    code, out, err = cli("generate", model, "--prompts", file, "--max-tokens", 6)
    assert code == 2 and len(out.splitlines()) == 1 and "prompts.jsonl, prompt 2: " in err.replace("\n", "")


def test_n_answers_have_their_own_seeds(cli: Any, model: Path) -> None:
    _, out, _ = cli(
        "generate", model, "Hello", "--max-tokens", 12, "--temperature", 1.5, "--n", 3, "--json", "--seed", 5
    )
    three = [row["token_ids"] for row in json.loads(out)]
    _, out, _ = cli("generate", model, "Hello", "--max-tokens", 12, "--temperature", 1.5, "--json", "--seed", 6)
    assert len(three) == 3 and json.loads(out)["token_ids"] == three[1]


def test_chat(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["Hello", "/draft 2", "/seed 4", "And again", "/stats", "/seed x", "/nonsense", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    code, out, err = cli("chat", model, "--max-tokens", 8)
    assert code == 0 and out.strip() and "turn 2" in err and "whole number" in err


def test_chat_commands(cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is saved, continued and asked again; each mistake is one line and ends nothing."""
    saved = tmp_path / "talk.json"
    lines = [
        "/retry",
        "/system Be brief.",
        "Hello",
        "/retry",
        f"/save {saved}",
        "/clear",
        f"/load {saved}",
        "And again",
        "/drafter none",
    ]
    lines += ["More", "/drafter", "/drafter what", "/save", f"/save {tmp_path / 'no' / 'x'}"]
    lines += [f"/load {tmp_path / 'none'}", "/stats", "/quit"]
    (tmp_path / "none").write_text("[]")
    monkeypatch.setattr("builtins.input", lambda *_, rest=iter(lines): next(rest))
    code, _, err = cli("chat", model, "--max-tokens", 8, "--drafter", "ngram", "--draft-tokens", 2)
    assert code == 0 and "turn 4" in err and "turn 5" not in err and err.count("3 messages") == 2
    assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == ["system", "user", "assistant"]
    for message in (
        "nothing was asked yet",
        "in use: none",
        "/drafter takes auto, none, ngram",
        "/save takes a file",
        "No such file",
    ):
        assert message in err, message
    assert "none is not a conversation written by /save" in err


def test_a_chat_goes_on_where_it_ended(cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--continue loads the same model and messages, in a file that nobody else can read; /clear forgets them."""
    monkeypatch.setattr("outrider.cli.chat.last_path", lambda: tmp_path / "cache" / "last.json")
    code, _, err = cli("chat", "--continue")
    assert code == 2 and "no conversation to continue" in err

    def talk(*words: object, lines: list[str]) -> str:
        monkeypatch.setattr("builtins.input", lambda *_, rest=iter([*lines, "/quit"]): next(rest))
        code, _, err = cli("chat", *words, "--max-tokens", 4)
        assert code == 0, err
        return err

    first = talk(model, lines=["My name is Ada.", "/seed 3", "/draft 2"])
    assert "outrider chat --continue goes on" in first and "seed: 3" in first and "draft tokens: 2" in first
    assert (tmp_path / "cache" / "last.json").stat().st_mode & 0o777 == 0o600
    saved = tmp_path / "kept.json"
    second = talk("-c", lines=["And who am I?", f"/save {saved}", "/clear"])
    assert "1 turn so far; the last message: My name is Ada." in second and "the conversation is forgotten" in second
    said = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in said if message["role"] == "user"] == ["My name is Ada.", "And who am I?"]
    code, _, err = cli("chat", "--continue")
    assert code == 2 and "no conversation to continue" in err


@pytest.mark.parametrize(("keys", "answers"), [("^^", 0), ("^hi^^", 1), ("^hi^x$", 2)])
def test_ctrl_c_on_an_empty_line_ends_only_when_pressed_twice(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, keys: str, answers: int
) -> None:
    typed = iter(keys.replace("hi", "h"))

    def read(_: object) -> str:
        key = next(typed)
        if key == "^":
            raise KeyboardInterrupt
        if key == "$":
            raise EOFError
        return key

    monkeypatch.setattr("outrider.cli.terminal.standard", lambda _: object())
    monkeypatch.setattr("outrider.cli.terminal.read", read)
    code, _, err = cli("chat", model, "--max-tokens", 2)
    assert code == 0 and err.count("tokens (length)") == answers and "Ctrl-C once more ends" in err
    assert next(typed, None) is None


def test_chat_takes_a_message_of_many_lines_from_a_pipe(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(['"""one', "two", 'three"""', '"""', 'four"""', "/stats", '"""no end'])

    def read(*_: object) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    code, _, err = cli("chat", model, "--max-tokens", 2)
    assert code == 0 and "turn 2" in err and "turn 3" not in err
    assert err.count("2 tokens (length)") == 3  # the last was answered, too, where the pipe ended before its quotes


def test_chat_takes_code_and_paths_for_messages(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["/* C */ int x;", "// C++", "/etc/hosts", "/draft 99", "/what", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    code, _, err = cli("chat", model, "--max-tokens", 2)
    assert code == 0 and err.count("2 tokens (length)") == 3 and "/draft takes 0..16 or auto, got '99'" in err


def test_a_chat_that_fills_the_context_says_what_to_do(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two three " * 12, "/clear", "four", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    code, _, err = cli("chat", model, "--max-tokens", 2, "--max-context", 64)
    assert code == 0 and err.count("tokens (length)") == 2 and "the context holds 64: /clear forgets" in err


def test_a_chat_survives_what_goes_wrong_in_it(
    cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused /retry keeps question and answer; a full disk, a damaged file and Ctrl-C in a command end nothing."""
    deep = tmp_path / "deep.json"
    saved = tmp_path / "kept.json"
    answered = tmp_path / "answered.json"
    deep.write_text("[" * 100_000)
    answered.write_text('{"messages": [{"role": "assistant", "content": "Welcome"}]}')
    lines = [
        "one",
        f"/system {'long ' * 20}",
        "/retry",
        "/system",
        f"/save {saved}",
        f"/load {deep}",
        "/save /dev/full",
    ]
    lines += [f"/load {answered}", "/retry", f"/save {answered}", "/image picture", "/quit"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.chat.Conversation.attach", interrupted)
    monkeypatch.setattr("builtins.input", lambda *_, rest=iter(lines): next(rest))
    code, _, err = cli("chat", model, "--max-tokens", 2, "--max-context", 64)
    assert code == 0 and "the context holds 64" in err and "deep.json is not a conversation written by /save" in err
    assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == ["user", "assistant"]
    assert "/dev/full: No space left" in err and "nothing was asked yet" in err
    assert [m["role"] for m in json.loads(answered.read_text())["messages"]] == ["assistant"]


def test_chat_shows_brackets_as_they_are(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["/seed [/x] [bold]", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    code, _, err = cli("chat", model)
    assert code == 0 and "got '[/x] [bold]'" in err


def test_options_without_effect_are_named(cli: Any, model: Path) -> None:
    _, _, err = cli("generate", model, "Hello", "--max-tokens", 2, "--top-p", 0.5, "--n", 2, "--drafter", "none")
    assert "--top-p: without effect at temperature 0" in err and "all 2 answers are the same" in err


def test_prove(cli: Any, model: Path) -> None:
    """The CPU kernels promise the same bits: every check must hold."""
    code, out, _ = cli(
        "prove",
        model,
        "--count",
        2,
        "--k",
        "2,5",
        "--max-tokens",
        12,
        "--temperatures",
        "0,0.8",
        "--json",
        "--ops",
        "cpu",
    )
    report = json.loads(out)
    assert report["passed"] and all(f["passed"] for f in report["findings"]), report
    assert {f["check"] for f in report["findings"]} == {"row invariance", "identity", "whole answers"}
    assert code == 0


def test_prove_with_an_adapter(cli: Any, model: Path, tmp_path: Path) -> None:
    """All checks run with the adapter's weights, the comparison of single rows too."""
    adapter = write_adapter(describe(str(model)).config, tmp_path / "style", size=0.3)
    words = ("--count", 1, "--k", 3, "--max-tokens", 8, "--temperatures", "0", "--json", "--ops", "cpu")
    code, out, err = cli("prove", model, *words, "--adapter", adapter)
    report = json.loads(out)
    assert code == 0 and report["passed"] and report["adapter"] == "style", err
    llm = LLM.load(str(model), LoadSettings(adapters={"style": str(adapter)}), say=lambda _: None)
    logits = []
    for name in (None, "style"):
        llm.adapter = name
        logits.append(block_logits(llm, [[2, *range(5, 40)]], [10], width=5))
    assert not torch.equal(*logits)
    code, _, err = cli("prove", model, *words, "--adapter", f"a={adapter}", "--adapter", f"b={adapter}")
    assert code == 2 and "one adapter at a time" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "MODEL"], "no prompt: write it after the model"),
        (["generate", "MODEL", "x", "--prompts", "nofile.jsonl"], "either a prompt or --prompts"),
        (["generate", "MODEL", " "], "prompt is empty"),
        (["generate", "MODEL", "x" * 3000], "context holds"),
        (["generate", "MODEL", "x", "--draft-tokens", "17"], "0..16"),
        (["generate", "MODEL", "x", "--draft-tokens", "-1"], "0..16"),
        (["generate", "MODEL", "x", "--draft-tokens", "lots"], "0..16"),
        (["generate", "MODEL", "x", "--temperature", "-0.1"], "temperature"),
        (["generate", "MODEL", "x", "--top-p", "0"], "--top-p must be in (0, 1]"),
        (["generate", "MODEL", "x", "--logprobs", "2"], "add --json"),
        (["generate", "MODEL", "--prompts", "nofile.jsonl", "--n", "2"], "--n is for a single prompt"),
        (["generate", "MODEL", "a\udcff"], "not valid Unicode"),
        (["generate", "MODEL", "x", "--verify", "block"], "No such option: --verify"),
        (["generate", "MODEL", "x", "--drafter", "nosuch"], "a drafter may also be auto, none, ngram or draft:MODEL"),
        (["chat", "MODEL", "--max-tokens", "0"], "--max-tokens must be"),
        (["generate", "MODEL", "x", "--ops", "abacus"], "abacus"),
        (["generate", "MODEL", "x", "--dtype", "int3"], "int3"),
        (["generate", "nowhere", "x"], "nowhere"),
        (["generate", "MODEL", "--prompts", "nofile.jsonl"], "nofile.jsonl"),
        (["prove", "MODEL", "--k", "0"], "1..16"),
        (["prove", "MODEL", "--k", "two"], "numbers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli: Any, model: Path, arguments: list[str], says: str) -> None:
    code, _, err = cli(*[str(model) if a == "MODEL" else a for a in arguments])
    lines = [line for line in err.splitlines() if line.startswith("outrider:")]
    assert code == 2 and len(lines) == 1 and says in lines[0], err
    assert "Traceback" not in err


def test_malformed_prompt_files_name_the_line(cli: Any, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for text, says in (
        ('{"prompt": "a"}\n{nope}\n', "prompts.jsonl:2: not JSON"),
        ('{"words": "a"}\n', "prompts.jsonl:1: no text under"),
    ):
        file.write_text(text)
        code, _, err = cli("generate", model, "--prompts", file)
        assert code == 2 and says in err
