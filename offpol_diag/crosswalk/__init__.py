"""The numbers each trainer would have logged for this dump, in its own names and definitions."""
