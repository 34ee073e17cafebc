"""The round loop of simulations and deployments."""
