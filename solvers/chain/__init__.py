"""Methods for chains, one a file, their bounds, and the registry that calls them."""
