"""Kernels in CUDA C++, compiled when they are first needed by the compiler library that torch brings along."""
