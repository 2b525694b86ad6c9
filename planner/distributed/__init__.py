"""Planning on several ranks: each measures, one solves, all do the same."""
