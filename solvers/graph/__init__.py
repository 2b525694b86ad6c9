"""Methods for graphs, one a file, their bounds, and the registry that calls them."""
