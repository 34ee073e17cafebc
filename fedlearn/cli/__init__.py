"""The command line: reads arguments, calls the packages below it and prints; no logic."""
