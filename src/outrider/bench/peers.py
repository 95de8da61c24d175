"""Other engines for comparison, if installed: same weights, same prompt ids, same machine.

The share of texts equal to ours is informational: another engine rounds differently, and its sampled texts depend on
its own random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import LoadSettings
from ..platforms.processor import usable_cores
from ..prompts import Prompt
from ..types import RequestStats, bad_input, require
from .harness import Answer, Contestant

if TYPE_CHECKING:
    import torch

    from ..llm import LLM


class Transformers:
    """`generate()` of Hugging Face transformers, one request at a time or a left-padded batch."""

    name = "transformers"

    def __init__(self, llm: LLM, path: Path, load: LoadSettings) -> None:
        import torch
        import torch._meta_registrations
        from transformers import AutoModelForCausalLM

        # transformers builds models on meta tensors, which need all of torch's rules (cli/quick.py)
        _ = torch._meta_registrations.register_meta

        self.encode = llm.encode_chat
        self.eos = sorted(llm.engine.eos)
        self.threads = cores(load)
        where: dict[str, object] = {}
        if path.suffix == ".gguf":  # dense weights: its packed kernels are many times slower on a CPU
            from transformers import GgufConfig

            where = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        folder = path.parent if path.suffix == ".gguf" else path
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=load.dtype or "bfloat16", **where).eval()
        self.model.to(llm.engine.device)

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[Answer], float]:
        import torch

        steps: list[tuple[float, int]] = []

        def clock(input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            """A stopping criterion that never stops; it records the time after every step."""
            steps.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        ids = [self.encode(p.text) for p in prompts]
        width = max(map(len, ids))
        pad = self.eos[0]
        tokens = torch.tensor([[pad] * (width - len(i)) + i for i in ids], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids], device=self.model.device)
        torch.manual_seed(seed)
        sampled: dict[str, object] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ours = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # our own kernels set torch to one thread
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=max(p.max_tokens for p in prompts),
                eos_token_id=self.eos,
                pad_token_id=pad,
                stopping_criteria=[clock],
                use_cache=True,
                **(sampled if temperature else {"do_sample": False}),
            )
        ended = time.perf_counter()
        torch.set_num_threads(ours)
        first, first_width = steps[0]
        answers = []
        for prompt, row in zip(prompts, out.tolist(), strict=True):
            new = row[width:][: prompt.max_tokens]
            end = next((i for i, token in enumerate(new, 1) if token in self.eos), len(new))
            answers.append(timed(new[:end], first_width - width, began, first=first, ended=ended))
        return answers, ended - first


class LlamaCpp:
    """llama-cpp-python over the same GGUF file, one request at a time."""

    name = "llama-cpp"

    def __init__(self, llm: LLM, path: Path, load: LoadSettings) -> None:
        require(path.suffix == ".gguf", f"--against llama-cpp: llama.cpp reads GGUF files only, {path} is none")
        from llama_cpp import Llama

        self.encode = llm.encode_chat
        self.eos = llm.engine.eos
        threads = {"n_threads": cores(load), "n_threads_batch": cores(load)}
        layers = -1 if llm.engine.device.type == "cuda" else 0
        self.model = Llama(str(path), n_ctx=4096, n_gpu_layers=layers, verbose=False, **threads)

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[Answer], float]:
        answers = []
        for prompt in prompts:
            self.model.reset()
            self.model.set_seed(seed)
            began = time.perf_counter()
            first = 0.0
            new: list[int] = []
            stream = self.model.generate(
                self.encode(prompt.text),
                temp=temperature,
                top_k=0 if temperature else 1,
                top_p=1.0,
                min_p=0.0,
                repeat_penalty=1.0,
            )
            for token in stream:
                if not new:
                    first = time.perf_counter()
                new.append(int(token))
                if token in self.eos or len(new) >= prompt.max_tokens:
                    break
            stream.close()
            ended = time.perf_counter()
            answers.append(timed(new, first_emitted=1, began=began, first=first, ended=ended))
        return answers, sum(stats.decode_s for _, stats in answers)


def cores(load: LoadSettings) -> int:
    """Number of threads: as many as our engine uses."""
    return load.threads or usable_cores()


def timed(ids: list[int], first_emitted: int, began: float, first: float, ended: float) -> Answer:
    """An answer that began, had its first tokens and ended at these times."""
    return ids, RequestStats(
        new_tokens=len(ids), first_emitted=first_emitted, ttft_s=first - began, decode_s=ended - first
    )


PEERS: dict[str, tuple[Callable[[LLM, Path, LoadSettings], Contestant], str]] = {
    "transformers": (Transformers, "transformers"),
    "llama-cpp": (LlamaCpp, "llama-cpp-python"),
}


def build(name: str, llm: LLM, path: Path, load: LoadSettings) -> Contestant:
    """path: the checkpoint of the loaded LLM, a folder or a .gguf file."""
    require(name in PEERS, f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    peer, package = PEERS[name]
    reason = f"is not installed (pip install {package})"
    with bad_input(ModuleNotFoundError, lambda error: f"--against {name}: {error.name} {reason}"):
        return peer(llm, path, load)
