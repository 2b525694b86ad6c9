"""Calls of modules captured as graphs of ops, forward and backward, and run as two programs."""
