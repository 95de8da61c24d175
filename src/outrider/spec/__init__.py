"""Guessing (drafters), deciding (choose, rejection) and deciding how much to guess (controller, cost)."""
