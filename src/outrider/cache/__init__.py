"""Paged K/V cache: `pages` allocates pages, `prefix` finds shared ones (both torch-free), `store` holds the tensors."""
