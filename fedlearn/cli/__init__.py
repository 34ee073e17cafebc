"""The command line: it reads arguments, calls the floors below, and prints; no logic."""
