"""Benchmarks and predictions: `harness` times contestants, `prove` compares outputs, `predict` estimates from a
configuration."""
