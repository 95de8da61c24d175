"""Messages from a terminal, whole: a paste is one message, however long and whatever lines it has.

A terminal's own line editing cuts a line at 4,095 bytes and gives pasted lines one by one. So keys are read one by one
here (with backspace, Ctrl-U and Ctrl-W), and the terminal is asked to bracket what is pasted. Where it does not, a line
end with more right behind it is taken to be part of a paste: nobody types that fast.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Callable

from rich.cells import cell_len

from ..types import OutriderError

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])")  # one whole key that is no character
BRACKETED, PLAIN = "\x1b[?2004h", "\x1b[?2004l"
RUSH_S = 0.02  # what comes sooner after a line end was pasted


class Terminal:
    """Reads from the terminal `fd`; `write` shows text on it."""

    def __init__(self, fd: int, write: Callable[[str], object]) -> None:
        self.fd, self.write = fd, write
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ahead = ""  # read and not yet looked at

    @staticmethod
    def standard() -> Terminal | None:
        """Standard input and output, where both are a terminal that understands escapes."""
        if sys.stdin is None:
            raise OutriderError("standard input is closed: nothing can be read from it")
        if (
            not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb"
        ):  # a dumb one knows no escapes
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")  # as keys are read, too
            return None

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        return Terminal(sys.stdin.fileno(), write)

    def read(self, prompt: str) -> str:
        """One message. EOFError at Ctrl-D on an empty line, KeyboardInterrupt at Ctrl-C."""
        before = termios.tcgetattr(self.fd)
        tty.setcbreak(self.fd, termios.TCSADRAIN)  # keys one by one, not shown; Ctrl-C still interrupts
        try:
            self.write(BRACKETED + prompt)
            return self._message()
        finally:
            self.write(PLAIN + "\r\n")
            termios.tcsetattr(self.fd, termios.TCSADRAIN, before)

    def _message(self) -> str:
        text = ""
        while True:
            key = self._key()
            if key == PASTE:
                pasted = self._paste()
                self._show(pasted)
                text += pasted
            elif key in ("\r", "\n"):
                if not self._more():
                    return text
                text += "\n"
                self._show("\n")
            elif key == "\x04":
                if not text:
                    raise EOFError
            elif key in ("\x7f", "\b"):
                text = self._rub(text, 1)
            elif key == "\x15":
                text = self._rub(text, len(text) - (text.rfind("\n") + 1))
            elif key == "\x17":
                text = self._rub(text, len(text) - len(re.sub(r"\S*[^\S\n]*\Z", "", text.rstrip(" \t"))))
            elif (key >= " " and key[0] != "\x1b") or key == "\t":
                text += key
                self._show(key)

    def _rub(self, text: str, count: int) -> str:
        """Take `count` characters from the end; those of an earlier line stay on the screen."""
        gone = text[len(text) - count :]
        width = cell_len(gone.rpartition("\n")[2])
        self.write("\b" * width + " " * width + "\b" * width)
        return text[: len(text) - count]

    def _show(self, text: str) -> None:
        self.write(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text).replace("\n", "\r\n"))

    def _paste(self) -> str:
        while PASTED not in self._ahead:
            self._ahead += self._read()
        pasted, _, self._ahead = self._ahead.partition(PASTED)
        return pasted.replace("\r\n", "\n").replace("\r", "\n")

    def _key(self) -> str:
        """The next character, or a whole escape sequence."""
        while not self._ahead or (self._ahead[0] == "\x1b" and not ESCAPE.match(self._ahead) and self._more(behind=1)):
            self._ahead += self._read()
        match = ESCAPE.match(self._ahead)
        key = match[0] if match else self._ahead[0]
        self._ahead = self._ahead[len(key) :]
        return key

    def _more(self, behind: int = 0) -> bool:
        """Has something been typed or pasted already?"""
        return len(self._ahead) > behind or bool(select.select([self.fd], [], [], RUSH_S)[0])

    def _read(self) -> str:
        data = os.read(self.fd, 1 << 16)
        if not data:
            raise EOFError
        return self._utf8.decode(data)
