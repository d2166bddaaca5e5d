"""Recommendation of a correction: the rules that choose, and the trainer's configuration of the choice."""
