"""Measurement: batches are turned into mergeable states, and states into numbers by formulas."""
