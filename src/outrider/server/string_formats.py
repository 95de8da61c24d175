"""Regular expressions for strings of a schema: patterns and named formats, each matching the whole text.

For JSON strings llguidance has both. Gemma 4 writes strings without JSON's quotes and escapes, so they are spelled out
here. The formats are those that llguidance knows; their grammars are from RFCs 3339, 4122, 5321, 1123, 4291 and 3986.
"""

from __future__ import annotations

import re
from functools import lru_cache

DAYS = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))|[1-9][0-9](?:0[48]|[2468][048]|[13579][26])-02-29)"
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = rf"{LABEL}(?:\.{LABEL}){{0,8}}"
BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{BYTE}(?:\.{BYTE}){{3}}"
HEX = r"[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """Eight groups, or fewer around `::`; the last two may be an IPv4 address."""
    tail = rf"(?:{HEX}:{HEX}|{IPV4})"
    forms = [rf"(?:{HEX}:){{6}}{tail}"]
    for before in range(7):
        head = rf"(?:(?:{HEX}:){{0,{before - 1}}}{HEX})?" if before else ""
        after = 5 - before
        if after >= 0:
            forms.append(rf"{head}::(?:{HEX}:){{{after}}}{tail}")
        elif after == -1:
            forms.append(rf"{head}::{HEX}")
    forms.append(rf"(?:(?:{HEX}:){{0,6}}{HEX})?::")
    return "(?:" + "|".join(forms) + ")"


_UNRESERVED = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
DURATION = (
    r"P(?:[0-9]+W|(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
    r"(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
    r"|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
)
ANY_TEXT = r"(?:.|\n)"
WORD_CHARACTERS = "A-Za-z0-9_"
ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": f"[{WORD_CHARACTERS}]", r"\W": f"[^{WORD_CHARACTERS}]"}
ASCII_IN_CLASS = {r"\d": "0-9", r"\w": WORD_CHARACTERS}
FORMATS = {
    "date-time": f"{DAYS}[Tt]{TIME}",
    "date": DAYS,
    "time": TIME,
    "duration": DURATION,
    "email": rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{HOST}",
    "hostname": HOST,
    "ipv4": IPV4,
    "ipv6": _ipv6(),
    "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:\/\/(?:{_UNRESERVED}*@)?(?:\[{_ipv6()}\]|{HOST})(?::[0-9]{{1,5}})?"
    rf"(?:\/{_UNRESERVED}*)*|\/?{_UNRESERVED}+(?:\/{_UNRESERVED}*)*)"
    rf"(?:\?(?:{_UNRESERVED}|[\/?])*)?(?:#(?:{_UNRESERVED}|[\/?])*)?",
    "unknown": f"{ANY_TEXT}*",
}


def whole(pattern: str) -> str:
    """Turns a pattern that may match anywhere in a text into an expression for the whole text. Raises ValueError for
    anchors inside groups."""
    alternatives = []
    for atoms in _alternatives(pattern):
        start = atoms[:1] == ["^"]
        body = atoms[1:] if start else atoms
        end = body[-1:] == ["$"]
        body = body[:-1] if end else body
        if _has_anchor(body):
            raise ValueError("an anchor inside the pattern")
        before = "" if start else ANY_TEXT + "*"
        after = "" if end else ANY_TEXT + "*"
        alternatives.append(f"{before}(?:{_in_ascii(body)}){after}")
    return alternatives[0] if len(alternatives) == 1 else "(?:" + "|".join(alternatives) + ")"


def _in_ascii(atoms: list[str]) -> str:
    """The expression with digits and word characters as ECMA-262 has them; the compiler's own cover all of Unicode."""
    out = []
    in_class = False
    for atom in atoms:
        out.append((ASCII_IN_CLASS if in_class else ASCII_CLASSES).get(atom, atom))
        in_class = atom != "]" if in_class else atom == "["
    return "".join(out)


@lru_cache(1024)
def compiles(pattern: str) -> bool:
    """True if the grammar compiler has an automaton for this pattern. It has none for look-around and
    back-references."""
    import llguidance

    try:
        grammar = llguidance.LLMatcher.grammar_from_lark(f"start: R\nR: {terminal(whole(pattern))}\n")
        return not llguidance.LLMatcher.validate_grammar(grammar, None)
    except ValueError:
        return False


def terminal(expression: str) -> str:
    """The expression as a Lark terminal, between slashes."""
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    return "/" + "".join(escapes.get(atom, atom) for atom in _atoms(expression)) + "/"


def _atoms(pattern: str) -> list[str]:
    """Characters, and escapes such as `\\d` as one."""
    return re.findall(r"\\.|.", pattern, re.DOTALL)


def _alternatives(pattern: str) -> list[list[str]]:
    """The pattern's atoms, cut at each `|` outside of groups and classes."""
    parts: list[list[str]] = [[]]
    depth = 0
    in_class = False
    for atom in _atoms(pattern):
        if in_class:
            in_class = atom != "]"
        elif atom == "[":
            in_class = True
        elif atom in ("(", ")"):
            depth += 1 if atom == "(" else -1
        elif atom == "|" and depth == 0:
            parts.append([])
            continue
        parts[-1].append(atom)
    return parts


def _has_anchor(atoms: list[str]) -> bool:
    """True if `^`, `$` or a word boundary stands outside of classes."""
    in_class = False
    for atom in atoms:
        if in_class:
            in_class = atom != "]"
        elif atom == "[":
            in_class = True
        elif atom in ("^", "$", "\\b", "\\B"):
            return True
    return False
