"""Other engines for comparison, where installed: same weights, same prompt ids, same machine.

The share of texts that equal ours is for information: another engine rounds differently, and a sampled text depends on
its own random numbers.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..prompts import Prompt
from ..types import OutriderError, require
from .harness import Contestant, TimedAnswer

if TYPE_CHECKING:
    import torch

Encode = Callable[[Prompt], list[int]]
PACKAGES = {"transformers": ("transformers", "transformers"), "llama-cpp": ("llama_cpp", "llama-cpp-python")}


@dataclass(frozen=True)
class PeerSetup:
    """The input of every peer: the checkpoint (a folder or a .gguf file), and where and how it runs."""

    path: Path
    encode: Encode
    eos: frozenset[int]
    threads: int | None
    device: str
    dtype: str

    @property
    def cores(self) -> int:
        """Threads: as many as we take ourselves."""
        return self.threads or len(os.sched_getaffinity(0))


def build(names: Sequence[str], setup: PeerSetup) -> list[Contestant]:
    peers: list[Contestant] = []
    for name in names:
        require(name in PACKAGES, f"unknown peer {name!r}; known: {', '.join(PACKAGES)}")
        module, package = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise OutriderError(f"--against {name}: the package is not installed (pip install {package})")
        peers.append(Transformers(setup) if name == "transformers" else LlamaCpp(setup))
    return peers


class Transformers:
    """`generate()` of Hugging Face transformers, one request at a time or a left-padded batch."""

    name = "transformers"

    def __init__(self, setup: PeerSetup) -> None:
        import torch
        import torch._meta_registrations
        from transformers import AutoModelForCausalLM

        # transformers makes models without memory: all of torch's rules (cli/quick.py)
        _ = torch._meta_registrations.register_meta

        self.encode, self.eos, self.threads, path = setup.encode, sorted(setup.eos), setup.cores, setup.path
        where: dict[str, object] = {}
        if path.suffix == ".gguf":  # dense weights: its packed kernels are many times slower on a CPU
            from transformers import GgufConfig

            where = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        folder = path.parent if path.suffix == ".gguf" else path
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=setup.dtype, **where).eval()
        self.model.to(setup.device)

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
        import torch
        from transformers import StoppingCriteria

        class Clock(StoppingCriteria):  # type: ignore[misc]
            """Looks at the watch after every step."""

            def __init__(self) -> None:
                self.at: list[tuple[float, int]] = []

            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
                self.at.append((time.perf_counter(), input_ids.shape[1]))
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        ids = [self.encode(p) for p in prompts]
        width = max(map(len, ids))
        pad = self.eos[0]
        tokens = torch.tensor([[pad] * (width - len(i)) + i for i in ids], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids], device=self.model.device)
        torch.manual_seed(seed)
        options: dict[str, object] = {"do_sample": temperature > 0.0}
        if temperature > 0.0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        ours = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # our own kernels set torch to one thread
        clock, began = Clock(), time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=max(p.max_tokens for p in prompts),
                eos_token_id=self.eos,
                pad_token_id=pad,
                stopping_criteria=[clock],
                use_cache=True,
                **options,
            )
        ended = time.perf_counter()
        torch.set_num_threads(ours)
        first, first_width = clock.at[0]
        answers = []
        for prompt, row in zip(prompts, out.tolist(), strict=True):
            new = _until_eos(row[width:], self.eos, prompt.max_tokens)
            later = max(0, len(new) - (first_width - width))
            answers.append(TimedAnswer(new, first - began, ended - first, later))
        return answers, ended - first


class LlamaCpp:
    """llama-cpp-python over the same GGUF file, one request at a time."""

    name = "llama-cpp"

    def __init__(self, setup: PeerSetup) -> None:
        if setup.path.suffix != ".gguf":
            raise OutriderError(f"--against llama-cpp: llama.cpp reads GGUF files only, {setup.path} is none")
        from llama_cpp import Llama

        self.encode, self.eos = setup.encode, setup.eos
        threads = {"n_threads": setup.cores, "n_threads_batch": setup.cores}
        layers = -1 if setup.device.startswith("cuda") else 0
        self.model = Llama(str(setup.path), n_ctx=4096, n_gpu_layers=layers, verbose=False, **threads)

    def answer(self, prompts: Sequence[Prompt], temperature: float, seed: int) -> tuple[list[TimedAnswer], float]:
        answers = []
        for prompt in prompts:
            self.model.reset()
            self.model.set_seed(seed)
            began, first = time.perf_counter(), 0.0
            new: list[int] = []
            stream = self.model.generate(
                self.encode(prompt),
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
            answers.append(TimedAnswer(new, first - began, ended - first, len(new) - 1))
        return answers, sum(a.decode_s for a in answers)


def _until_eos(tokens: Sequence[int], eos: Sequence[int], most: int) -> list[int]:
    out = []
    for token in tokens[:most]:
        out.append(token)
        if token in eos:
            break
    return out
