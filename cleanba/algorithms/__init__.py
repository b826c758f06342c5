"""One file for each algorithm, with the same sections in the same order; the other modules hold what they share."""
