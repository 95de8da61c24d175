"""Checkpoints: resolve a name to files (`hub`), read the files (`files`), load the weights (`load`)."""
