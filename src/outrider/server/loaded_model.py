"""One loaded model with everything that answers for it: the engine's thread (`runner`), the places that clients take in
turn (`turns`), compiled grammars of its vocabulary, the processes that tokenise long texts (`tokenizer_process`) and
render chat templates (`template`), and what makes engine requests of bodies (`prepare`).
"""

from __future__ import annotations

from dataclasses import replace

from ..engine.chat_template import TemplateProcess
from .fair import TurnQueue
from .grammars import Grammars
from .model_info import ServedModel
from .prepare import Preparer
from .runner import Runner
from .settings import ServerSettings
from .tokenizer_process import TokenizerProcess


class LoadedModel:
    """Made off the event loop (the tokenizer is asked a few things); `start` and `stop` belong on it."""

    def __init__(self, name: str, backend: ServedModel, settings: ServerSettings) -> None:
        self.name, self.backend = name, backend
        self.runner = Runner(backend.engine, 60.0 * settings.keep_prefixes, settings.finish_prompts)
        self.turns = TurnQueue(backend.places or settings.max_concurrent)
        self.grammars = Grammars(backend.tokenizer, backend.vocab_size)
        self.tokenizer_process = TokenizerProcess(lambda: backend.tokenizer.json, backend.tokenizer.ids_here)
        backend.tokenizer.elsewhere = self.tokenizer_process.ids
        self.template = TemplateProcess(backend.tokenizer.files.chat_template or "")
        backend.tokenizer.render_elsewhere = self.template.render
        self.prepare = Preparer(backend, replace(settings, model_name=name))

    def start(self) -> None:
        self.runner.start()

    async def stop(self) -> None:
        """End what runs. May be called twice."""
        await self.runner.stop()
        await self.grammars.close()
        self.backend.tokenizer.elsewhere = None
        self.tokenizer_process.close()
        self.backend.tokenizer.render_elsewhere = None
        self.template.close()
        if not isinstance(self.backend.vision, str):
            self.backend.vision.close()
