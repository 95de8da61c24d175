"""Paged K/V: `pages` counts pages (torch-free), `prefix` finds shared ones (torch-free), `store` holds the tensors."""
