"""All benchmarks in one list: how each is run, what its results say, and whether the code has changed since."""
