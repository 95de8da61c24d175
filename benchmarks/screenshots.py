"""The pictures of docs/page.md, taken from a real model's page in headless Chromium.

python benchmarks/screenshots.py smollm2 --out docs/images
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]
from outrider.config import EngineConfig  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.server.main import HttpServer  # noqa: E402
from outrider.server.prepare import ServedModel  # noqa: E402
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
RACE = "Write a Python class for a stack with push, pop and peek, and explain each method."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    llm = LLM.load(args.model, drafter=args.drafter, engine=EngineConfig(max_batch=4, max_context=2048))
    server = HttpServer(ServedModel.of(llm), ServerSettings(public_name(args.model), port=0))
    with server.running() as url:
        args.out.mkdir(parents=True, exist_ok=True)
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            page = open_page(browser, url, 1280, 800, "dark")
            page.click("#measure")  # plain decoding's speed, for the chart
            page.wait_for_selector("#against:has-text('tokens/s')", timeout=300_000)
            ask(page, CHAT)
            page.screenshot(path=args.out / "chat.png")
            page.click("#tab-race")
            page.fill("#race-prompt", RACE)
            page.click("#race-go")
            page.wait_for_selector("#verdict.same, #verdict.differs", timeout=300_000)
            page.screenshot(path=args.out / "race.png")
            page.click("#tab-server")
            page.wait_for_timeout(4500)
            page.screenshot(path=args.out / "server.png")
            drawn = open_page(browser, url, 1280, 1000, "light")
            drawn.locator("#k").evaluate("n => { n.value = 6; n.dispatchEvent(new Event('input')); }")
            llm.engine.spec = replace(
                llm.engine.spec, tree=12
            )  # as with --tree 12: whatever pays here, the picture shows branches
            ask(drawn, TREE)
            llm.engine.spec = replace(llm.engine.spec, tree=None)
            drawn.locator("#branches").scroll_into_view_if_needed()
            drawn.locator("aside").screenshot(path=args.out / "branches.png")
            light = open_page(browser, url, 1280, 800, "light")
            ask(light, CHAT)
            light.screenshot(path=args.out / "light.png")
            phone = open_page(browser, url, 390, 844, "light")
            ask(phone, CHAT)
            phone.screenshot(path=args.out / "phone.png")
            browser.close()


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
