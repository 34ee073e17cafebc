"""Deployments: a coordinator process, its clients, and what an operator does to them."""
