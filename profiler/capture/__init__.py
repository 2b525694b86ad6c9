"""The whole training step of a model as one graph of ops."""
