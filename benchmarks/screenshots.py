"""The pictures of docs/page.md, taken from the page in headless Chromium.

python benchmarks/screenshots.py            a script answers: the page says so, and its speeds mean nothing
python benchmarks/screenshots.py smollm2    a model answers
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from tests.running import running  # noqa: E402

from outrider.config import EngineConfig  # noqa: E402
from outrider.engine.step import Request  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.server.main import HttpServer  # noqa: E402
from outrider.server.model_info import ServedModel  # noqa: E402
from outrider.server.settings import ServerSettings, public_name  # noqa: E402

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHAT = "Write a Python function that reverses a list, and explain it."
TREE = "What is a good way to learn to play the piano?"
RACE = "Write a short story about a fox who learns to count."
ANSWERS = {
    CHAT: """A list is reversed by a slice with a negative step:

```python
def reverse_list(items: list[int]) -> list[int]:
    # a slice makes a new list
    return items[::-1]

print(reverse_list([1, 2, 3]))  # [3, 2, 1]
```

It visits every item once, so for $n$ items it takes $T(n) = \\sum_{i=1}^{n} c = \\mathcal{O}(n)$ steps.

| way | makes a new list |
|---|---|
| `items[::-1]` | yes |
| `items.reverse()` | no |

Use `reverse()` where no other part of the program holds the list.""",
    TREE: "Play a little every day. Begin with both hands apart, slowly, and count aloud. When a passage is safe, play "
    "it with both hands, and only then a little faster. Learn one short piece by heart, so that you always have "
    "something to play.",
    RACE: "A fox lived at the edge of the wood and could not count. One evening she found three eggs in the grass, and "
    "then she found two more. She laid them in a row and touched each with her nose: one, two, three, four, five. "
    "The owl, who had watched from the old oak, asked how many there were. The fox looked at the row, and then at "
    "the sky, and said: as many as there are toes on my foot, and one more. The owl laughed so that she nearly "
    "fell from her branch. From then on the fox counted everything: the trees of the wood, the steps to the "
    "river, and on clear nights, until she fell asleep, the stars.",
}


class Scripted:
    """A server that says what is written above, at a set pace, several tokens per cycle."""

    def __init__(self) -> None:
        from tests.server_fakes import FakeEngine, Served, tokenizer

        tok = tokenizer(texts=list(ANSWERS.values()))

        def say(request: Request) -> str:
            prompt = tok.decode(request.prompt)
            return next((answer for question, answer in ANSWERS.items() if question in prompt), ANSWERS[TREE])

        self.engine = FakeEngine(tok, say, delay=0.02)
        self.served = Served(self.engine, tok, vocab=4096, model_name="scripted")

    @contextmanager
    def running(self) -> Iterator[str]:
        with self.served:
            yield self.served.url

    def branch(self, on: bool) -> None:
        self.engine.branching = on


class Model:
    def __init__(self, name: str, drafter: str) -> None:
        self.llm = LLM.load(name, drafter=drafter, engine=EngineConfig(max_batch=4, max_context=2048))
        self.server = HttpServer(ServedModel.of(self.llm), ServerSettings(public_name(name), port=0))

    def running(self) -> AbstractContextManager[str]:
        return running(self.server)

    def branch(self, on: bool) -> None:
        """Draws branches as with --tree 12, whatever pays on this machine."""
        policy = self.llm.engine.policy
        policy.spec = replace(policy.spec, tree=12 if on else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="without one a script answers")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    server = Model(args.model, args.drafter) if args.model else Scripted()
    args.out.mkdir(parents=True, exist_ok=True)
    with server.running() as url, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        take(browser, url, server, args.out)
        browser.close()


def take(browser: Any, url: str, server: Scripted | Model, out: Path) -> None:
    page = open_page(browser, url, 1280, 800, "dark")
    page.click("#measure")  # plain decoding's speed, for the chart
    page.wait_for_selector("#against:has-text('tokens/s')", timeout=300_000)
    ask(page, CHAT)
    page.screenshot(path=out / "chat.png")
    page.click("#tab-race")
    page.fill("#race-prompt", RACE)
    page.emulate_media(reduced_motion="reduce")  # the replay is moved by hand
    page.click("#race-go")
    page.wait_for_selector("#verdict.same, #verdict.differs", timeout=300_000)
    for name, share in (("race", 1.0), ("replay", 0.3)):
        page.locator("#replay-at").evaluate(
            "(n, share) => { n.value = n.max * share; n.dispatchEvent(new Event('input')); }", share
        )
        page.screenshot(path=out / f"{name}.png")
    page.click("#tab-server")
    page.wait_for_timeout(4500)
    page.screenshot(path=out / "server.png")
    drawn = open_page(browser, url, 1280, 1000, "light")
    drawn.locator("#k").evaluate("n => { n.value = 6; n.dispatchEvent(new Event('input')); }")
    server.branch(True)
    ask(drawn, TREE)
    server.branch(False)
    drawn.locator("#cycles").screenshot(path=out / "branches.png")
    light = open_page(browser, url, 1280, 800, "light")
    ask(light, CHAT)
    light.screenshot(path=out / "light.png")
    phone = open_page(browser, url, 390, 844, "light")
    ask(phone, CHAT)
    phone.screenshot(path=out / "phone.png")


def open_page(browser: Any, url: str, width: int, height: int, scheme: str) -> Any:
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    page.goto(url)
    page.wait_for_selector("#model:not(:empty)")
    return page


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:last-child .foot", timeout=300_000)


if __name__ == "__main__":
    main()
