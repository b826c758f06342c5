"""Each algorithm top to bottom in a file of its own, sections in one order; what they share beside them."""
