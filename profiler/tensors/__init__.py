"""Tensors as they come: nested, of several parts, spread over processes; and the storages below them."""
