"""How often `rescore` is right, on faults that are made apart from its hypotheses, and how fast it scores.

models   five architectures, trained for a minute each, with an adapter
engines  engines and trainers at fault: an own decode with a cache, own merging and own rounding
power    `python -m benchmarks.rescore.power [ARCHITECTURE…]`: sides and hypotheses right
speed    `python -m benchmarks.rescore.speed`: tokens a second and memory, against plain loops and TRL's
"""
