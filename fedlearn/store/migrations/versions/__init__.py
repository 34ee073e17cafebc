"""One module per revision, numbered from the oldest."""
