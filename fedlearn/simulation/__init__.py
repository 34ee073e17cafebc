"""Federated rounds on one machine: populations of clients, their devices, the engine."""
