"""`outrider doctor --report`: a page to paste into an issue. The machine, a check of its kernels, speeds; a minute.

It is how a system that was never at hand is confirmed: what it prints on a Mac can be read beside what Linux prints.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from .. import __version__
from ..ops.cpu import build
from ..platforms import limits, memory, processor
from . import common

MODEL = "smollm2"
PROMPT = "Explain in two sentences why the sky is blue."
TOKENS = 64
# rows of the products whose bits are compared: one tile and more than one
PRODUCT_ROWS = (1, 4, 17)
MAX_ERROR = 0.02  # of a product's size; activations have 8 bits


@dataclass(frozen=True)
class Check:
    name: str
    good: bool
    result: str


def lines(findings: Sequence[str], measure: bool = True) -> Iterator[str]:
    """The page. findings: the lines of `outrider doctor`. measure: check and time kernels and the default model."""
    began = time.perf_counter()
    yield "### Machine"
    yield "```"
    yield from machine()
    yield from findings
    yield "```"
    if measure:
        yield "### Check"
        yield "| what | good | result |"
        yield "|---|---|---|"
        for check in checks():
            yield f"| {check.name} | {'yes' if check.good else '**NO**'} | {check.result} |"
        yield f"\n{time.perf_counter() - began:.0f} seconds. {PROMPT!r} was answered greedily, {TOKENS} tokens at most."


def machine() -> Iterator[str]:
    """The system, the processor's features as levels need them, memory, what the sandboxes lack."""
    known = {feature for needs in build.NEEDS.values() for feature in needs.split()}
    features = sorted(processor.cpu_flags() & known)
    fast = processor.performance_cores()
    yield f"system           {platform.platform()}, {processor.machine()}"
    yield f"features         {' '.join(features) or 'none of those that levels need'}"
    yield f"cores            {processor.usable_cores()} usable, {'all alike' if fast is None else f'{fast} fast ones'}"
    total_gib = memory.total_bytes() / 2**30
    yield f"memory           {total_gib:.0f} GiB, {memory.available_bytes() / 2**30:.0f} GiB available"
    yield f"sandboxes        {limits.missing_protection() or 'complete'}"


def checks() -> Iterator[Check]:
    """Every level with a library, then the default model. A part that fails is a line, not an end."""
    for level in build.runnable():
        if build.found(level) is None and level != build.best_isa():
            yield Check(f"level {level}", good=True, result="not compiled here")
            continue
        yield tried(f"level {level}", partial(level_check, level))
    yield tried("memory and arithmetic", speed_check)
    yield tried("the same answers with drafts", model_check)


def tried(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    try:
        good, result = check()
    except Exception as error:  # the page is worth most where something fails
        return Check(name, good=False, result=f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "\\|"))
    return Check(name, good, result)


def level_check(level: str) -> tuple[bool, str]:
    """Rows alone and together, one thread and all, and products beside their definition."""
    from ..ops.cpu.certify import Problems, certification_of, outcome
    from ..ops.cpu.lib import load

    lib = load(level)
    certification = certification_of(level, lib)
    bits = []
    worst = 0.0
    for threads in (1, processor.default_threads()):
        pool = lib.or_pool_new(threads)
        try:
            digest, error = products(Problems(lib, pool))
        finally:
            lib.or_pool_free(pool)
        bits.append(digest)
        worst = max(worst, error)
    same = len(set(bits)) == 1
    good = level not in certification.rejected and same and worst < MAX_ERROR
    threads_say = "the same bits with any number of threads" if same else "OTHER BITS with several threads"
    return good, f"{outcome(certification)}; {threads_say}; error {worst:.4f}; bits {bits[0]}"


def products(problems: object) -> tuple[str, float]:
    """A hash of the products of all formats, and the largest error beside sums in double precision, as a part of the
    products' own size. Inputs are whole numbers of 64ths: the same on every system."""
    import torch

    from ..ops.cpu.certify import FORMATS, Problems
    from ..ops.cpu.packing import c_weight

    assert isinstance(problems, Problems)
    digest = hashlib.sha256()
    worst = 0.0
    for kind in FORMATS:
        columns = 1280
        weight = problems.weight(kind, rows=48, columns=columns)
        x = torch.from_numpy(problems.random.integers(-128, 128, (PRODUCT_ROWS[-1], columns))).float() / 64
        values = torch.empty(48, columns)
        ids = torch.arange(48)
        problems.lib.or_rows(c_weight(weight), ids.data_ptr(), 48, 1.0, values.data_ptr())
        want = x.double() @ values.double().T
        for rows in PRODUCT_ROWS:
            result = problems.product(weight, x[:rows])
            digest.update(result.numpy().tobytes())
            difference = (result.double() - want[:rows]).abs().max() / want[:rows].abs().max()
            worst = max(worst, float(difference))
    return digest.hexdigest()[:12], worst


def speed_check() -> tuple[bool, str]:
    from ..bench.here import here

    measured = here(weight_bytes=0.56)
    return True, f"{measured.bandwidth:.1f} GB/s of weights, {1000 * measured.rate:.0f} GFLOP/s for further rows"


def model_check() -> tuple[bool, str]:
    """The default model with and without drafts. It is downloaded the first time (98 MB)."""
    from ..bench.turns import compare, decoder
    from ..config import LoadSettings
    from ..types import SamplingParams

    llm = common.load_llm(MODEL, LoadSettings(device="cpu"))
    params = SamplingParams(max_tokens=TOKENS)
    llm.generate(llm.encode_chat("Hello"), SamplingParams(max_tokens=8))  # warm up
    result = compare(decoder(llm, llm.encode_chat(PROMPT), params), rounds=2)
    plain = result.plain.stats.decode_tps
    drafting = result.drafting.stats.decode_tps
    text = hashlib.sha256(repr(result.plain.token_ids).encode()).hexdigest()[:12]
    return result.identical, f"{plain:.1f} tokens/s plain, {drafting:.1f} with drafts; tokens {text}"


def title() -> str:
    """A title for the issue."""
    return f"outrider {__version__} on {platform.system()} {platform.release()}, {processor.processor_name()}"
