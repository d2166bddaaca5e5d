"""Diagnosis of a mismatch: a logging or engine bug, or an honest difference, and its cause."""
