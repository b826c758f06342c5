"""Checks of finished runs: parts of a run are computed again here and compared with what it recorded."""
