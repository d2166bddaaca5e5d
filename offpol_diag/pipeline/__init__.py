"""The correction pipeline: presets as tables of numbers, and every formula of a token once."""
