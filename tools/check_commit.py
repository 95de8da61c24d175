"""Is a commit message in the project's form? `area: what changed`, at most 72 characters, a blank line, then the why.

python tools/check_commit.py FILE     the message in FILE (pre-commit's commit-msg hook)
python tools/check_commit.py          the message of HEAD
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
SUBJECT = re.compile(r"[a-z0-9][\w ,/.+-]*: \S")
FREE = ("Merge ", "Revert ", "fixup! ", "squash! ")


def mistakes(message: str) -> list[str]:
    """What is wrong with a message, one line each; nothing for a good one. Lines that begin with # are git's."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(FREE):
        return []
    found = []
    if not SUBJECT.match(subject):
        found.append(f"the subject is not of the form 'area: what changed': {subject!r}")
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, {LONGEST} are allowed")
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    if len(lines) > 1 and lines[1]:
        found.append("the second line is not blank")
    return found


def main() -> None:
    if len(sys.argv) > 1:
        message = Path(sys.argv[1]).read_text(encoding="utf-8")
    else:
        message = subprocess.run(["git", "log", "-1", "--format=%B"], capture_output=True, text=True, check=True).stdout
    found = mistakes(message)
    if found:
        raise SystemExit("\n".join(["commit message:", *found]))


if __name__ == "__main__":
    main()
