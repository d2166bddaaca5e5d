"""Engines that run an analysis: in this process, in worker processes, on local GPUs, on a Ray cluster."""
