"""A head and its loss, a few rows at a time, where the head's whole output would be the largest tensor of a step."""
