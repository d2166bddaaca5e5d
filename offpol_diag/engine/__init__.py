"""What is measured: observers turn a batch into mergeable states, rows turn states into numbers."""
