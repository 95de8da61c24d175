"""Runs at the start of each Python process that has this folder on its PYTHONPATH."""

import os

if os.environ.get("OUTRIDER_TEST_SYSTEM"):
    import hook

    hook.install(os.environ["OUTRIDER_TEST_SYSTEM"])
