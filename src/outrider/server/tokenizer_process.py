"""Tokenises long texts in a separate process, so that they hold neither the GIL nor the cores that other requests need.

Half a megabyte takes a tokenizer a second or two. The process has a low priority and tokenises one text at a time; if
it has died, the text is tokenised in the caller's process and the next text restarts it. The process runs this file
(engine/child_process.py).
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator

if __name__ != "__main__":  # the process itself does without this package, which saves memory
    from ..engine.child_process import ChildLost, ChildProcess

NICE = 10  # a tenth of a core if all are busy


class TokenizerProcess:
    def __init__(self, tokenizer: Callable[[], str], here: Callable[[str, bool], list[int]]) -> None:
        """`tokenizer`: in Hugging Face's format. `here`: tokenises in the caller's process."""
        self._here = here
        self._child = ChildProcess(__file__, lambda: tokenizer().encode())

    def ids(self, text: str, special: bool) -> list[int]:
        """Token ids of a text. Blocks; may be called from any thread."""
        data = bytes([special]) + text.encode()  # UnicodeError if the text is not valid Unicode
        try:
            return array("i", self._child.call(data)).tolist()
        except ChildLost:
            return self._here(text, special)

    def start(self) -> None:
        """Starts the process before the first long text. Returns at once."""
        threading.Thread(target=self._child.start, name="outrider-tokenizer", daemon=True).start()

    def close(self) -> None:
        """Ends the process; waiting texts are tokenised by their callers."""
        self._child.close()


def answers(frames: Iterator[bytes]) -> Iterator[bytes]:
    """Main function of the process."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(next(frames).decode())
    if hasattr(os, "nice"):  # Windows has other priorities
        os.nice(NICE)  # only now: the first text waits for the start
    for data in frames:
        ids = tokenizer.encode_batch_fast([data[1:].decode()], add_special_tokens=bool(data[0]))[0].ids
        yield array("i", ids).tobytes()
