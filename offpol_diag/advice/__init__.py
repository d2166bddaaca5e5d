"""Which correction to use: candidates, the rules that choose, and the configuration of the choice."""
