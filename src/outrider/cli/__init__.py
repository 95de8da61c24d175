"""The command line: one file a command, and what a command's process sets for itself."""

import gc

# Imports make half a million objects that stay for good. To go through them again for every 700 new ones takes 0.18 s
# of a cold start.
gc.set_threshold(50_000, 20, 20)
