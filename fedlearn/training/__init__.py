"""How one client trains: a trainer for any torch module."""
