"""One traced training step: its calls and ops, its dataflow, and its partition into stages."""
