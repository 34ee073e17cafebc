"""Running an experiment, and showing what came of it: progress, report, plot, comparison."""
