"""`make test-systems`: tests once more, without what Windows or macOS lack (hook.py).

The suites below must pass. Left out are tests marked `linux`, those that SKIPPED names, with its reason, and slow ones.
Exit code 1 if one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SYSTEMS = ("win32", "darwin")
SUITES = (
    "tests/unit/test_config.py",
    "tests/unit/test_prompts.py",
    "tests/unit/test_llm.py",
    "tests/unit/platforms",
    "tests/unit/spec",
    "tests/unit/models",
    "tests/unit/weights",
    "tests/unit/cli",
    "tests/unit/engine",
    "tests/unit/bench",
    "tests/e2e/test_cli.py",
    "tests/e2e/test_server.py",
    "tests/e2e/test_server_options.py",
    "tests/e2e/test_server_engine.py",
    "tests/e2e/test_server_exact.py",
    "tests/e2e/test_server_prompts.py",
    "tests/e2e/test_server_routes.py",
    "tests/e2e/test_server_limits.py",
    "tests/e2e/test_server_stores.py",
    "tests/e2e/test_cli_images.py",
    "tests/e2e/test_cli_audio.py",
    "tests/e2e/test_launch.py",
    "tests/e2e/test_train.py",
)
# parts of a test's name, and why it is left out
NOT_HIDDEN = {"free_memory_is_known": "it asks the system itself, which is Linux"}
SKIPPED: dict[str, dict[str, str]] = {  # by system
    "win32": {
        "fork": "Windows has no fork",
        "keys_typed_during": "the test opens a pseudo-terminal",
        "a_terminal_that_is_closed": "Windows has no signal for it",
        "beyond_its_memory": "Windows gives a process no limit of memory here",
        "sighup": "Windows has no such signal",
        "cgroup": "a limit of Linux's containers",
        "meminfo": "a file of Linux",
        "fifo": "Windows has no such files",
        "a_pipe_is_read": "Windows has no such files",
        "without_a_writer": "Windows has no such files",
        "has_not_every_letter": "output is UTF-8 on Windows",
        "holds_a_lock": "Windows's module of locks is not there",
        "says_what_the_command_says": "Windows's module of locks is not there",
        "few_file_descriptors": "Windows does not count sockets as files",
        **NOT_HIDDEN,
    },
    "darwin": {"cgroup": "a limit of Linux's containers", "meminfo": "a file of Linux", **NOT_HIDDEN},
}


def command(system: str, suites: tuple[str, ...]) -> list[str]:
    left_out = " or ".join(SKIPPED[system])
    return [sys.executable, "-m", "pytest", "-q", "-m", "not linux and not slow", "-k", f"not ({left_out})", *suites]


def main() -> None:
    failed = False
    for system in SYSTEMS:
        print(f"{system}: tests marked linux are left out: they are about what only Linux has")
        for part, reason in SKIPPED[system].items():
            print(f"{system}: tests named *{part}* are left out: {reason}")
        path = os.pathsep.join([str(HERE), str(ROOT / "src")])
        env = {**os.environ, "PYTHONPATH": path, "OUTRIDER_TEST_SYSTEM": system, "OMP_NUM_THREADS": "1"}
        env.setdefault("CC", "cc")  # on Windows no other compiler of the path is taken
        done = subprocess.run(command(system, tuple(sys.argv[1:]) or SUITES), cwd=ROOT, env=env)
        failed = failed or done.returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
