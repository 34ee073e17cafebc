"""Secure aggregation: the coordinator learns the sum of updates and nothing else about any."""
