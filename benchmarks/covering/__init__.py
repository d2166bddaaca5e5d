"""How often the 95% intervals hold the truth: dumps of known truth, drawn again and again."""
