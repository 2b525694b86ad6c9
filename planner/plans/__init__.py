"""From a profile to a plan: the cost model, solving, rules stated by hand, and memory/time curves."""
