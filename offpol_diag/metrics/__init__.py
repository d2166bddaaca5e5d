"""What is measured: observers that turn a batch into mergeable states, and rows that turn states into numbers."""
