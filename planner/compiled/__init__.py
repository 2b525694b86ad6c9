"""Schedules of single ops carried out: programs for forward and backward, as torch.compile runs them."""
