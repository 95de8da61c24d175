"""Speculative decoding: drafters, verification (choose) and the choice of K (controller, cost)."""
