"""Generated models, training habits and budgets; each case is held to the unplanned model's training, bit for bit."""
