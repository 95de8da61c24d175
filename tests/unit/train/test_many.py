"""Tasks shared out to several processes: nothing is answered twice, whatever number of them there was before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from outrider.train.answers import RecordedAnswer, Task
from outrider.train.many import all_answers, shared_out, undone

TASKS = [Task(n, 0, 1.0, n) for n in range(7)]


def wrote(path: Path, *answers: RecordedAnswer) -> None:
    path.write_text("".join(json.dumps(asdict(a)) + "\n" for a in answers))


def answer(n: int, *tokens: int, done: bool = True) -> RecordedAnswer:
    return RecordedAnswer(**asdict(TASKS[n]), tokens=list(tokens), done=done)


def test_tasks_that_are_done_are_nobodys(tmp_path: Path) -> None:
    wrote(tmp_path / "answers.jsonl", answer(3, 1, 2))  # of one process, before
    wrote(tmp_path / "answers-1.jsonl", answer(1, 4, done=False), answer(5, 6))
    (first, mine), (second, theirs) = shared_out(tmp_path, TASKS, 2)
    assert (first.name, second.name) == ("answers-0.jsonl", "answers-1.jsonl")
    assert [t.prompt for t in mine] == [0, 2, 4, 6] and [t.prompt for t in theirs] == [
        1
    ]  # half an answer goes on where it was
    assert [t.prompt for t in undone(tmp_path, TASKS)] == [0, 1, 2, 4, 6]  # of one process, after two


def test_an_answer_in_two_files_counts_once_and_whole(tmp_path: Path) -> None:
    wrote(tmp_path / "answers-0.jsonl", answer(1, 4, 5, 6), answer(2, 7))
    wrote(tmp_path / "answers-1.jsonl", answer(1, 4, done=False))
    found = {a.prompt: a.tokens for a in all_answers(tmp_path)}
    assert found == {1: [4, 5, 6], 2: [7]} and len(all_answers(tmp_path)) == 2
