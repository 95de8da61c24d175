"""Scores answers: GSM8K by the last number, MMLU by the letter, HumanEval by running its tests.

HumanEval runs code that a model wrote: in a subprocess with limits on time, memory and file size, an empty environment
and an empty folder. That stops accidents, not malice; only answers of the model under test are run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from ..prompts import CHECKS
from ..types import OutriderError

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
LIMITS = """
import resource as r
for what, most in ((r.RLIMIT_CPU, {seconds}), (r.RLIMIT_AS, 1 << 30), (r.RLIMIT_FSIZE, 1 << 20)):
    r.setrlimit(what, (most, most))
"""


def grade(check: Mapping[str, str], answer: str, seconds: int = 5) -> bool:
    kind = check.get("kind")
    if kind == "gsm8k":
        return same_number(last_number(answer), check["answer"])
    if kind == "mmlu":
        return letter(answer) == check["answer"]
    if kind == "humaneval":
        return passes(check["prompt"], answer, check["test"], check["entry_point"], seconds)
    raise OutriderError(f"unknown check {kind!r}; known: {', '.join(CHECKS)}")


def last_number(text: str) -> str | None:
    """The number after the last ####, or simply the last one."""
    tail = text.rsplit("####", 1)[-1]
    found = NUMBER.findall(tail) if "####" in text else []
    if found:
        return str(found[0]).replace(",", "")
    found = NUMBER.findall(text)
    return str(found[-1]).replace(",", "") if found else None


def same_number(given: str | None, wanted: str) -> bool:
    try:
        return given is not None and abs(float(given) - float(wanted)) < 1e-6
    except ValueError:
        return False


def letter(text: str) -> str | None:
    """A, B, C or D: the first that is a word of its own."""
    found = re.search(r"(?:^|[^A-Za-z])([ABCD])(?:[^A-Za-z]|$)", text)
    return found.group(1) if found else None


def function(prompt: str, answer: str, entry_point: str) -> str:
    """The program to test: the answer's code block, behind the prompt's imports; or prompt and answer as one text."""
    found = BLOCK.search(answer)
    code = found.group(1) if found else answer
    if f"def {entry_point}" in code:
        return prompt.split(f"def {entry_point}")[0] + "\n" + code
    return prompt + code


def passes(prompt: str, answer: str, test: str, entry_point: str, seconds: int = 5) -> bool:
    program = (
        LIMITS.format(seconds=seconds) + function(prompt, answer, entry_point) + f"\n{test}\ncheck({entry_point})\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={},
                timeout=seconds + 5,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a null byte in the answer
            return False
    return done.returncode == 0
