"""Measure how often the diagnosis names the right cause of faults made on rollouts of small models."""
