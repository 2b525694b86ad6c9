"""What a plan does and why: timelines, peaks, decisions about ops, memory by owner, and pictures of them."""
