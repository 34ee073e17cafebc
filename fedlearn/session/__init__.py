"""One client's side of the protocol; the same code simulated and deployed."""
