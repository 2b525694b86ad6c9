"""A step of single ops: its graph problem, and what of it may wait in host memory."""
