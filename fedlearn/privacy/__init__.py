"""Differential privacy: what noise is drawn, and what a run spends by it."""
