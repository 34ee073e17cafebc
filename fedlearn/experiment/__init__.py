"""Runs experiments and shows their results: progress, report, plot, comparison."""
