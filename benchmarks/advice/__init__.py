"""Measure how well the recommended correction points, in worlds whose exact policy gradient is known."""
