"""Paged K/V: `pages` counts pages, `prefix` finds shared ones (both torch-free), `store` holds the tensors, `swap`
those on the host."""
