"""Trains many clients' chains of layers at once, with a hand-written backward pass."""
