"""A step of single ops: which ops run together, and its graph problem."""
