"""Does the recommended correction help? Judged in worlds where the policy gradient is known exactly."""
