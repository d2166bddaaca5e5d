"""Inputs made at random: files of dumps, and what else the commands read; `python -m tests.fuzz KIND`."""
