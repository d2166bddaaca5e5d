"""Measurement: batches are turned into tallies, and tallies into numbers by formulas."""
