"""Generated tensor programs, planned op by op, each held to the unplanned model: values bit for bit, bytes exactly."""
