"""How the page shows an answer's text: Markdown, formulas, code, token marks."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image
from tests.pages import MARKDOWN, STORY, ask, kinds, needs_chromium

pytest_plugins = ["tests.page_fixtures"]
pytestmark = needs_chromium


def test_marks_toggle_without_losing_the_text_and_are_not_colour_alone(page: Any) -> None:
    page.select_option("#marks", "full")
    ask(page, "Again.")
    styles = {}
    for kind in ("accepted", "corrected", "bonus"):
        span = page.locator(f".message.assistant .{kind}").first
        styles[kind] = span.evaluate("n => getComputedStyle(n).borderBottomStyle")
    assert len(set(styles.values())) == 3  # three kinds of line
    coloured = span.evaluate("n => getComputedStyle(n).backgroundColor")
    page.select_option("#marks", "off")
    assert span.evaluate("n => getComputedStyle(n).backgroundColor") != coloured
    page.select_option("#marks", "quiet")
    assert span.evaluate("n => getComputedStyle(n).borderBottomStyle") == "none"
    assert (
        page.locator(".message.assistant .accepted").first.evaluate("n => getComputedStyle(n).borderBottomStyle")
        == "solid"
    )
    assert page.locator(".message.assistant .body").last.inner_text() == STORY


def test_answers_are_text_not_markup(page: Any) -> None:
    ask(page, "Give me markup <img src=x onerror=alert(1)>")
    assert page.locator(".message b, .message img").count() == 0
    assert "<b>not markup</b>" in page.locator(".message.assistant").last.inner_text()


def test_markdown_is_rendered_and_safe(page: Any) -> None:
    page.locator("#max-tokens").fill("512")
    ask(page, "Give me a list of code.")
    body = page.locator(".message.assistant .body").last
    assert body.locator("h4").inner_text() == "Reversing" and body.locator("strong").inner_text() == "two"
    assert body.locator("ol > li").count() == 2 and body.locator("ol ul li").inner_text() == "in place"
    code = body.locator(".code pre code")
    assert code.inner_text() == "def back(xs):\n    return xs[::-1]  # **not bold**\n"
    assert "mono" in code.evaluate("n => getComputedStyle(n).fontFamily").lower()
    assert body.locator("td").all_inner_texts() == ["a", "1"]
    assert body.locator("a").evaluate_all("n => n.map(x => x.href)") == ["https://example.org/x_(y)"]
    assert "javascript:alert(1)" in body.inner_text() and "```" not in body.inner_text()
    assert {"accepted", "corrected"} <= kinds(page.locator(".message.assistant").last)
    page.reload()  # kept in the browser, marks too
    page.wait_for_selector(".message.assistant .foot")
    assert page.locator(".code pre code").inner_text() == code.inner_text()
    assert {"accepted", "corrected"} <= kinds(page.locator(".message.assistant").last)


def test_markdown_in_any_pieces_ends_the_same(page: Any) -> None:
    """Text that streams in pieces must end like text rendered at once, and no prefix may throw."""
    once, pieces = page.evaluate(
        """async (source) => {
        const { Document } = await import("./page/markdown.js");
        const leaf = (text) => document.createTextNode(text);
        const a = document.createElement("div"), b = document.createElement("div");
        new Document(a, leaf).show(source);
        const grown = new Document(b, leaf);
        for (let i = 1; i <= source.length; i += 1) grown.show(source.slice(0, i));
        return [a.innerHTML, b.innerHTML];
    }""",
        MARKDOWN
        + "\n\n> quote\n> more\n\n- a\n- b\n\n***\n*em* _em_ snake_case_name 2 * 3 * 4 `` a`b `` ~~del~~ \\*no\\*\n```\nopen",
    )
    assert once == pieces
    assert "<em>em</em> <em>em</em> snake_case_name 2 * 3 * 4 <code> a`b </code> <del>del</del> *no*" in once


def rendered(page: Any, source: str) -> str:
    return page.evaluate(
        """async (source) => {
        const { Document } = await import("./page/markdown.js"), box = document.createElement("div");
        new Document(box, (text) => document.createTextNode(text)).show(source);
        return box.innerHTML;
    }""",
        source,
    )


def test_an_underscore_stands_clear_of_the_mark_beneath_it(page: Any) -> None:
    """At scale 1, in prose and in code: the line of an accepted token is at least a row of pixels below it."""
    page.evaluate("document.body.dataset.marks = 'full'")
    marked = '<span class="accepted">____</span>'
    code = f'<div class="code"><pre><code>{marked}</code></pre></div>'
    page.evaluate(
        "html => { document.getElementById('log').innerHTML = html; }",
        f'<article class="message assistant"><div class="body"><p>{marked}</p>{code}</div></article>',
    )
    for span in page.locator("#log .accepted").all():
        box = span.bounding_box()
        clip = {"x": box["x"] + box["width"] / 2, "y": box["y"] - 2, "width": 1, "height": box["height"] + 6}
        image = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
        colour = "n => [getComputedStyle(n).color, getComputedStyle(n).borderBottomColor]"
        ink, line = (tuple(int(v) for v in c[4:-1].split(",")) for c in span.evaluate(colour))
        column = [image.getpixel((0, y)) for y in range(image.height)]
        inked = [
            y for y, pixel in enumerate(column) if pixel[0] > line[0] + 0.4 * (ink[0] - line[0])
        ]  # the dark theme: ink is light
        lined = [y for y, pixel in enumerate(column) if sum(abs(a - b) for a, b in zip(pixel, line)) < 60]
        assert inked and lined and min(lined) - max(inked) >= 2, column


def test_nesting_without_end_neither_kills_the_page_nor_loses_text(page: Any) -> None:
    items = "".join("* " if i % 2 else "+ " for i in range(2000))
    for source in (">" * 2000 + " end", "> " * 2000 + "end", items + "end", "*_" * 1500 + "end" + "_*" * 1500):
        out = rendered(page, source)
        assert out.count("<blockquote>") <= 16 and out.count("<ul>") <= 16 and "end" in out
    ask(page, "And the page still answers.")


def test_formulas_are_drawn_and_lose_nothing(page: Any) -> None:
    out = rendered(page, r"Then $\int_0^1 f(x)\,dx = \frac{a_1}{\sqrt{2}}$ and \(\alpha \le \beta\).")
    assert (
        out.count("<math") == 2
        and '<mspace width=".167em"' in out
        and "<mfrac>" in out
        and "<msqrt>" in out
        and "≤" in out
    )
    assert r'alttext="\int_0^1 f(x)\,dx = \frac{a_1}{\sqrt{2}}"' in out
    block = rendered(
        page, "Before\n\n$$\n\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}\n$$\n\nafter $$\\sum_{i=1}^n i$$"
    )
    assert (
        block.count('display="block"') == 2
        and block.count("<mtr>") == 2
        and block.count("<mtd>") == 4
        and "<munderover>" in block
    )
    assert rendered(page, "It costs $5 or $10.") == "<p>It costs $5 or $10.</p>"
    unknown = r"Unknown: $\frobnicate{x}\,y$, and a\,b."
    assert rendered(page, unknown) == f"<p>{unknown}</p>"
    deep = rendered(page, "$" + "{" * 3000 + "x" + "}" * 3000 + "$")
    assert "<math" not in deep and "x" in deep


def test_code_is_highlighted_and_stays_the_code(page: Any) -> None:
    code = 'def back(xs):  # turn "it" round\n    return f"{xs}" + str(1_000)'
    out = rendered(page, f"```python\n{code}\n```")
    for kind, text in (
        ("keyword", "def"),
        ("name", "back"),
        ("comment", '# turn "it" round'),
        ("string", 'f"{xs}"'),
        ("number", "1_000"),
    ):
        assert f'<span class="hl-{kind}">{text}</span>' in out
    changed = page.evaluate(
        """async (source) => {
        const { highlight } = await import("./page/highlight.js");
        const names = "python js ts c java go rust bash sql json yaml css html diff other".split(" ").concat("");
        return names.filter((name) => highlight(name, source).map((p) => p[1]).join("") !== source);
    }""",
        code + "\n/* open <!-- 'a\n\"b` ${x} \\",
    )
    assert changed == []
