"""A step of single ops: which run together, in which order, its graph problem, and what may wait in host memory."""
