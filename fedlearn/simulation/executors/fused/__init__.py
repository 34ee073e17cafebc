"""Chains of layers, many clients at once, with the backward pass written by hand."""
