"""Compose a report from blocks (`sections`) and draw it in several formats (`render`)."""
