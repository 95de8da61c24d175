"""Kernels in CUDA C++, compiled at first use by NVRTC, which comes with torch."""
