"""Scripts that measure what the documentation says of speed, and of how often answers are right."""
