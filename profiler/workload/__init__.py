"""The training step as the user runs it, and what has to be put back after running it."""
