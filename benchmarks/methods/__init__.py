"""Methods that benchmarks compare the planner's with, and that it does not use itself; see README.md here."""
