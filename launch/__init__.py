"""Command line, environment, process groups and logging."""
