"""Other engines for comparison, where installed: same weights, same prompt ids, same machine.

Their texts are shown but not compared with ours: another engine rounds differently, and a sampled text depends on its
own random numbers.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..prompts import Prompt
from ..types import OutriderError
from .harness import Contestant, TimedAnswer

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

Encode = Callable[[Prompt], list[int]]
KNOWN = ("transformers", "transformers-lookup", "llama-cpp", "llama-cpp-lookup")
LOOKUP_TOKENS = 4


class Causal(Protocol):
    """The part of a transformers model that is used here."""

    device: torch.device
    generation_config: GenerationConfig

    def to(self, device: str) -> Causal: ...

    def generate(self, inputs: torch.Tensor, **options: object) -> torch.Tensor: ...

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> torch.utils.hooks.RemovableHandle: ...


def build(
    names: Sequence[str], path: Path, encode: Encode, eos: frozenset[int], threads: int | None, device: str, dtype: str
) -> list[Contestant]:
    """`path`: a checkpoint folder or a .gguf file."""
    peers: list[Contestant] = []
    threads = threads or len(os.sched_getaffinity(0))  # as many as we take ourselves
    for name in names:
        module = {"transformers": "transformers", "llama-cpp": "llama_cpp"}.get(name.removesuffix("-lookup"))
        if name not in KNOWN or module is None:
            raise OutriderError(f"unknown peer {name!r}; known: {', '.join(KNOWN)}")
        if importlib.util.find_spec(module) is None:
            package = "llama-cpp-python" if module == "llama_cpp" else module
            raise OutriderError(f"--against {name}: the package is not installed (pip install {package})")
        lookup = name.endswith("-lookup")
        if module == "transformers":
            peers.append(Transformers(name, path, encode, eos, threads, device, dtype, lookup))
        else:
            peers.append(LlamaCpp(name, path, encode, eos, threads, device, lookup))
    return peers


class Transformers:
    """`generate()` of Hugging Face transformers, one request at a time or a left-padded batch."""

    def __init__(
        self,
        name: str,
        path: Path,
        encode: Encode,
        eos: frozenset[int],
        threads: int | None,
        device: str,
        dtype: str,
        lookup: bool,
    ):
        import torch
        import torch._meta_registrations
        from transformers import AutoModelForCausalLM

        # transformers makes models without memory: all of torch's rules (cli/quick.py)
        _ = torch._meta_registrations.register_meta

        self.name, self.encode, self.eos, self.lookup = name, encode, sorted(eos), lookup
        kind = getattr(torch, dtype)
        self.threads = threads or torch.get_num_threads()
        where: dict[str, object] = {}
        if path.suffix == ".gguf":  # dense weights: its packed kernels are many times slower on a CPU
            from transformers import GgufConfig

            where = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        folder = path.parent if path.suffix == ".gguf" else path
        self.model: Causal = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **where).eval()
        self.model.to(device)

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

        if self.lookup and len(prompts) > 1:
            raise OutriderError("transformers' prompt lookup answers one prompt at a time: use --batch 1")
        ids = [self.encode(p) for p in prompts]
        width = max(map(len, ids))
        pad = self.eos[0]
        tokens = torch.tensor([[pad] * (width - len(i)) + i for i in ids], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids], device=self.model.device)
        options: dict[str, object] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self.lookup else {}
        if temperature > 0.0:
            torch.manual_seed(seed)
            options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        else:
            options |= {"do_sample": False}
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
            answers.append(
                TimedAnswer(prompt.id, "", new, first - began, ended - first, max(0, len(new) - (first_width - width)))
            )
        return answers, ended - first


class LlamaCpp:
    """llama-cpp-python over the same GGUF file, one request at a time."""

    def __init__(
        self, name: str, path: Path, encode: Encode, eos: frozenset[int], threads: int | None, device: str, lookup: bool
    ) -> None:
        if path.suffix != ".gguf":
            raise OutriderError(f"--against {name}: llama.cpp reads GGUF files only, {path} is none")
        from llama_cpp import Llama

        self.name, self.encode, self.eos = name, encode, eos
        draft_model = None
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft_model = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
        layers = -1 if device.startswith("cuda") else 0
        self.model = Llama(
            str(path),
            n_ctx=4096,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=layers,
            verbose=False,
            draft_model=draft_model,
        )

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
            text = self.model.detokenize([t for t in new if t not in self.eos]).decode("utf-8", "replace")
            answers.append(TimedAnswer(prompt.id, text, new, first - began, ended - first, len(new) - 1))
        return answers, sum(a.decode_s for a in answers)


def _until_eos(tokens: Sequence[int], eos: Sequence[int], most: int) -> list[int]:
    out = []
    for token in tokens[:most]:
        out.append(token)
        if token in eos:
            break
    return out
