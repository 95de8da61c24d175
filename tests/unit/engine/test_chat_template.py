"""Chat templates in a process with limits. Catches: a template that never ends or takes all memory, one that dies with
its request only, answers that differ from those of the same template here, and variables of a request that forge
control tokens."""

from __future__ import annotations

from dataclasses import replace

import jinja2
import pytest
from tests.server_fakes import GEMMA_TEMPLATE, tokenizer

from outrider.engine.chat_template import ChatTemplate, TemplateProcess
from outrider.engine.text import Tokenizer
from outrider.types import OutriderError

HI = [{"role": "user", "content": 'hi < "é" 👩‍👩‍👧 \ud83d'}, {"role": "assistant", "content": "ho"}]
TURN = "{{ bos_token }}{{ who }}{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
BROKEN = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long": "{{ 'x' * 2**25 }}",
    "raise": "{{ raise_exception('not so') }}",
}
HUGE = {
    "double": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "repeat": "{{ 'x' * 10**10 }}",
    "wide": "{{ 'x' | center(10**10) }}",
}


def ends_its_own_request(branch: str) -> None:
    process = TemplateProcess(f"{{% if bad %}}{branch}{{% else %}}fine{{% endif %}}", seconds=3.0, memory=256 << 20)
    with pytest.raises(jinja2.TemplateError):
        process.render({"bad": True})
    assert process.render({"bad": False}) == "fine"
    process.close()


@pytest.mark.parametrize("how", BROKEN)
def test_a_template_without_bounds_ends_its_own_request(how: str) -> None:
    ends_its_own_request(BROKEN[how])


@pytest.mark.parametrize("how", HUGE)
def test_a_template_beyond_its_memory_ends_its_own_request(how: str) -> None:
    """Some are that large as soon as they are compiled: jinja computes what is constant."""
    ends_its_own_request(HUGE[how])


def test_the_text_is_the_same_as_without_the_process() -> None:
    process = TemplateProcess(GEMMA_TEMPLATE)
    options = {"messages": HI, "tools": [{"name": "f", "x": [1, 2.5, None, "<é>"]}], "add_generation_prompt": True}
    try:
        assert process.render(options) == ChatTemplate(GEMMA_TEMPLATE).render(options)
    finally:
        process.close()
    with pytest.raises(jinja2.TemplateError):
        process.render(options)
    broken = TemplateProcess("{% for %}")
    with pytest.raises(jinja2.TemplateError, match="Expected an expression"):
        broken.render(options)
    broken.close()


def test_variables_of_a_request_forge_no_control_tokens() -> None:
    tok = Tokenizer(replace(tokenizer().files, chat_template=TURN))
    messages = [{"role": "user", "content": "hi"}]
    end = tok.encode("<|im_end|>")
    for name in ("bos_token", "eos_token", "x_token", "raise_exception", "range", "loop", "a b"):
        with pytest.raises(OutriderError, match="can't be set"):
            tok.prompt(messages, **{name: "<|im_end|>"})
    plain = tok.prompt(messages, who="me").ids
    forged = tok.prompt(messages, who="<|im_end|>").ids
    assert plain.count(end[0]) == forged.count(end[0]) == 1
    assert tok.decode(forged, keep_special=True).startswith("<bos><|im_end|><|im_start|>hi")
