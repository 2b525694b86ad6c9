"""What fits: the largest batch, what would make more fit, and profiles scaled to other sizes."""
