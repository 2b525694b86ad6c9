"""From the graph of a call to a problem for the graph solvers: which ops run together, and in which order; no torch."""
