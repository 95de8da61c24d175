"""Tokenizer, chat templates and the incremental detokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import tiny
from transformers import AutoTokenizer

from outrider.engine.text import LONG_TEXT, Detokenizer, Tokenizer
from outrider.types import OutriderError
from outrider.weights import hub
from outrider.weights.files import text_files

TEXTS = (
    "Hello, world",
    "  two  spaces\n\ttab",
    "日本語 naïve 👩‍👩‍👧",
    "",
    " ",
    "<|im_start|>user\nhi<|im_end|>",
    "\x00\x7f",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target("llama", tmp_path_factory.mktemp("text") / "m")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(text_files(hub.resolve(folder)))


def scored() -> Tokenizer:
    """A SentencePiece-like one, with byte tokens and the added space."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    from outrider.types import TextFiles

    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "b"])}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(TextFiles("scored", lambda: backend, bos_id=1, add_bos=True))


def test_ids_and_text_as_transformers_has_them(folder: Path, tokenizer: Tokenizer) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, keep_special=True) == text
    messages = [{"role": "user", "content": 'a < b & "c"'}]
    assert tokenizer.render(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.prompt(messages, add_generation_prompt=False).ids == theirs.apply_chat_template(
        messages, return_dict=False
    )
    assert tokenizer.eos_ids == (tiny.EOS,)


def test_bos_is_added_once_and_only_when_asked() -> None:
    tokenizer = scored()
    assert tokenizer.encode("a", bos=True) == [1, *tokenizer.encode("a")]
    assert tokenizer.encode("", bos=True)[:1] == [1]


def test_token_bytes_make_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 👩‍👩‍👧\n"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    assert tokenizer.token_bytes(287) == b"" and tokenizer.token_bytes(-1) == b""  # rows without a token
    assert scored().token_bytes(2 + 0xE2) == b"\xe2" and scored().token_bytes(260) == b" a"


@given(st.data())
def test_streaming_gives_what_decoding_gives(data: st.DataObject) -> None:
    """Any ids, broken UTF-8 included, in any pieces."""
    tokenizer = data.draw(st.sampled_from([scored(), BYTES]))
    ids = data.draw(st.lists(st.integers(0, 261), max_size=24))
    detok = Detokenizer(tokenizer)
    text = ""
    at = 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        piece = detok.push(ids[at : at + step])
        text = text + piece
        at = at + step
    assert text + detok.flush() == tokenizer.decode(ids)


def _bytes() -> Tokenizer:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        tiny.write_tokenizer(Path(folder))
        (Path(folder) / "config.json").write_text('{"eos_token_id": 1}')
        return Tokenizer(text_files(hub.resolve(folder)))


BYTES = _bytes()


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    ids = BYTES.encode("é€👍")
    detok = Detokenizer(BYTES)
    assert [detok.push([i]) for i in ids] == ["", "é", "", "", "€", "", "", "", "👍"]
    detok.push(ids[:1])
    assert detok.flush() == "\ufffd"


def test_special_tokens_show_only_when_asked_and_eos_never() -> None:
    ids = [tiny.START, *BYTES.encode("hi"), tiny.END, tiny.EOS]
    assert Detokenizer(BYTES).push(ids) == "hi"
    assert Detokenizer(BYTES, keep_special=True).push(ids) == "<|im_start|>hi<|im_end|>"


def test_a_continuation_keeps_its_space() -> None:
    tokenizer = scored()
    assert Detokenizer(tokenizer).push([260]) == "a" and Detokenizer(tokenizer, prompt=[1, 5]).push([260]) == " a"


def test_no_tokenizer_and_no_template_are_one_line(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(OutriderError, match="has no tokenizer"):
        Tokenizer(text_files(hub.resolve(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OutriderError, match="is not a tokenizer") as caught:
        Tokenizer(text_files(hub.resolve(tmp_path)))
    assert "\n" not in str(caught.value)
    bare = Tokenizer(replace(tokenizer.files, chat_template=None))
    assert not bare.has_chat_template
    with pytest.raises(OutriderError, match="has no chat template"):
        bare.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("given", "says"), [("a\udcffb", "not valid Unicode"), (b"ab", "got bytes"), (7, "got int")])
def test_what_is_no_text_is_one_line(tokenizer: Tokenizer, given: Any, says: str) -> None:
    with pytest.raises(OutriderError, match=says):
        tokenizer.encode(given)


def template(tokenizer: Tokenizer, text: str) -> Tokenizer:
    return Tokenizer(replace(tokenizer.files, chat_template=text))


def test_template_helpers(tokenizer: Tokenizer) -> None:
    rendered = template(
        tokenizer,
        "{{ strftime_now('%Y')|length }} {{ tools|tojson }} {{ eos_token }}{% generation %}x{% endgeneration %}",
    )
    assert rendered.render([], tools=[{"a": "<é>"}]) == '4 [{"a": "<é>"}] <eos>x'
    loop = template(
        tokenizer,
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ extra }}",
    )
    assert loop.render([{"content": "1"}, {"content": "2"}], extra="!") == "1!"


def test_a_template_writes_an_image_as_the_model_reads_it(tokenizer: Tokenizer) -> None:
    """Gemma 3 reads empty lines and an end around every image, which its template does not write."""
    written = replace(tokenizer.files, chat_template="{{ messages[0].content }}")

    def image_text(text_of: Any) -> tuple[str, str]:
        mark = text_of(tokenizer.eos_ids[0])
        return mark, f"[{mark}]"

    eos = tokenizer.backend.id_to_token(tokenizer.eos_ids[0])
    message = [{"role": "user", "content": f"a {eos}"}]
    assert Tokenizer(written, image_text=image_text).render(message) == f"a [{eos}]"
    assert Tokenizer(written).render(message) == f"a {eos}"
    assert Tokenizer(written, image_text=lambda text_of: None).render(message) == f"a {eos}"


def test_templates_are_sandboxed_and_their_errors_are_one_line(tokenizer: Tokenizer) -> None:
    for text, match in (
        ("{{ raise_exception('roles must alternate\\nok') }}", "roles must alternate ok"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ 1 / 0 }}", "division"),
        ("{% if %}", "is broken"),
    ):
        with pytest.raises(OutriderError, match=match) as caught:
            template(tokenizer, text).render([{"role": "user", "content": "x"}])
        assert "\n" not in str(caught.value)


def test_where_long_texts_go_may_change_while_one_is_looked_at(folder: Path) -> None:
    tokenizer = Tokenizer(text_files(hub.resolve(folder)))
    tokenizer.elsewhere = lambda text, special: [7]

    class Text(str):
        """While its length is taken, another thread ends the process that tokenises long ones."""

        def __len__(self) -> int:
            tokenizer.elsewhere = None
            return LONG_TEXT + 1

    assert tokenizer.ids(Text("a"), False) == [7]
    assert tokenizer.ids(Text("a"), False) == tokenizer.ids_here("a", False)
