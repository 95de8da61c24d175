"""Measuring and predicting: `harness` times contestants, `prove` compares texts, `predict` reckons from a
configuration."""
