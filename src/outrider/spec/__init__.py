"""Speculative decoding: drafters, verification (choose, rejection) and the choice of K (controller, cost)."""
