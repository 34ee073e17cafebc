"""Differential privacy: the noise that hides users, and the accounting of what a run spends."""
