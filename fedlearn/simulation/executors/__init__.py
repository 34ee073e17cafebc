"""Executors train a block of clients: one after another, or stacked in one tensor operation.

All executors agree up to float rounding; the sequential one is the reference.
"""
