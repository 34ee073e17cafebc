"""Secure aggregation: the coordinator learns the sum of the updates and nothing else about them."""
