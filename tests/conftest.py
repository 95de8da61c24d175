"""Without a GPU, Triton kernels run in its interpreter; the switch must be set before anything imports triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
