"""One module a revision, oldest first by number."""
