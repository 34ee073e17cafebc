"""Start, fork and watch worker processes, and make sure that none outlives its parent."""
