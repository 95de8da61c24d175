"""The figures of docs/how-it-works.md: formulas against sums written out, images against what the script draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = DOCS / "js" / "explainer.js"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def evaluate(expression: str) -> object:
    program = f"const e = require({json.dumps(str(SCRIPT))}); process.stdout.write(JSON.stringify({expression}))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@needs_node
def test_formulas_have_the_values_of_their_definitions() -> None:
    """Geometric sums, the knee of an H200 and experts counted one by one; a changed formula fails here."""
    cases = [(k, a) for k in (0, 1, 4, 16) for a in (0.0, 0.2, 0.85, 1.0)]
    got = evaluate("[" + ",".join(f"e.tokensPerCycle({k},{a})" for k, a in cases) + "]")
    assert got == pytest.approx([sum(a**j for j in range(k + 1)) for k, a in cases])
    assert evaluate("e.speedUp(4, 0.85, 0.012, 0.006)") == pytest.approx(sum(0.85**j for j in range(5)) / 1.072)
    assert evaluate("[e.bestK(0.2, 0.2, 0.2), e.speedUp(1, 0.2, 0.2, 0.2)]") == pytest.approx([0, 1.2 / 1.4])
    assert evaluate("[e.intensity(1, 16), e.intensity(5, 4)]") == [1, 20]
    assert evaluate("[e.knee(e.H200), e.kneeRows(e.H200, 16), e.kneeRows(e.H200, 4)]") == pytest.approx(
        [989 / 4.8, 989 / 4.8, 989 / 4.8 / 4]
    )
    assert evaluate("[e.attainable(e.H200, 1), e.attainable(e.H200, 1000)]") == pytest.approx([4.8e12, 989e12])
    assert evaluate("[1, 5, 16].map((r) => e.expertsTouched(r, 128, 8))") == pytest.approx(
        [8, 128 * (1 - (15 / 16) ** 5), 128 * (1 - (15 / 16) ** 16)]
    )


@needs_node
def test_images_are_what_the_script_draws() -> None:
    """Without scripts a reader sees the same figure: `node docs/js/explainer.js write` was run."""
    drawn = evaluate("Object.entries(e.FIGURES).map(([name, f]) => [name, f.draw(f.start || {}, true)])")
    assert isinstance(drawn, list)
    for name, svg in drawn:
        assert (DOCS / "images" / f"explain-{name}.svg").read_text(encoding="utf-8") == svg + "\n", name


def test_page_has_a_fallback_for_every_figure_and_nothing_is_fetched() -> None:
    page = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    figures = re.findall(r'<div data-figure="(\w+)"><img src="([^"]+)" alt="([^"]{20,})"></div>', page)
    assert len(figures) == page.count("data-figure=") == 8
    assert all(source == f"images/explain-{name}.svg" for name, source, _ in figures)
    assert not re.search(r"https?://(?!www\.w3\.org)|fetch\(|import\(|localStorage", SCRIPT.read_text(encoding="utf-8"))
