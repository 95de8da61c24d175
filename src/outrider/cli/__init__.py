"""The command line: one file per command, and settings of the command's process."""

import gc

# Imports create half a million permanent objects. Garbage collection after every 700 new ones would take 0.18 s of a
# cold start.
gc.set_threshold(50_000, 20, 20)
