"""Whether a run holds what it says: parts of it, computed again here and compared."""
