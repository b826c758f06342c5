"""A run on disk: its directory, its log, curves, plots, report, list, diff."""
