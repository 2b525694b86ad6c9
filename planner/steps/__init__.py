"""A step of single ops: which ops run together, its graph problem, and what may wait in host memory."""
