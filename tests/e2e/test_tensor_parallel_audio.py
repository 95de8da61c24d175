"""Sound where a model is divided over two processes: rank 0 makes the soft tokens, both run the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import tiny, tiny_audio, tiny_vision

from outrider import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys
from tests.e2e.test_tensor_parallel_audio import answers
from outrider import LLM
llm = LLM.load(sys.argv[1], drafter=sys.argv[2], tensor_parallel=2, **json.loads(sys.argv[3]))
print(json.dumps(answers(llm)))
llm.close()
"""
SETTINGS = dict(image_tokens=70, max_context=480, dtype="float32", threads=1, max_batch=4, page_size=16, device="cpu")


def answers(llm: LLM) -> dict[str, object]:
    clips = [(tiny_audio.samples(4_000, seed), tiny_audio.RATE) for seed in (1, 2)]
    text = [2, 50, 51, tiny_audio.AUDIO, 60, tiny_vision.IMAGE, 61, tiny_audio.AUDIO, 62]
    prompt = {"text": text, "audio": clips, "images": [tiny_vision.picture(64, 48)]}
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=5, ignore_eos=True)
    plain = llm.generate([prompt, [5, 6, 7]], params, drafter=False)
    drafted = llm.generate([prompt, [5, 6, 7]], params, draft_tokens=4)
    first = llm.generate(prompt, SamplingParams(max_tokens=1, logprobs=8))[0]
    assert first.logprobs is not None
    return {
        "plain": [answer.token_ids for answer in plain],
        "drafted": [answer.token_ids for answer in drafted],
        "num_drafted": sum(answer.stats.drafted for answer in drafted),
        "first": {str(token): value for token, value in first.logprobs[0].items()},
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", tiny_audio.KINDS)
def test_two_processes_hear_what_one_hears(kind: str, tmp_path: Path) -> None:
    target = tiny_audio.write(kind, tmp_path / "target")
    drafter = tiny.write_assistant(kind, tmp_path / "drafter")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(target), str(drafter), json.dumps(SETTINGS)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout.splitlines()[-1])
    assert two["plain"] == two["drafted"] and two["num_drafted"]
    llm = LLM.load(str(target), drafter=str(drafter), **SETTINGS)
    one = answers(llm)["first"]
    llm.close()
    assert isinstance(one, dict)
    shared = one.keys() & two["first"].keys()
    assert len(shared) >= 6  # K/V is kept in 16 bits: sums in another order round otherwise
    assert all(abs(one[token] - two["first"][token]) < 5e-3 for token in shared)
