"""A whole step captured as one graph, and measured as that."""
