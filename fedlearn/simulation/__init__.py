"""Simulation of federated learning: populations of clients, their devices, and the engine."""
