"""Training under a plan: running out of memory, shapes that change, solvers measured side by side."""
