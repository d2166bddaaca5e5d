"""Measure how often the 95% intervals hold the truth, on repeated draws of dumps of known truth."""
