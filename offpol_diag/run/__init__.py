"""Engines that run an analysis: threads of this process, on local GPUs too, or tasks on a Ray cluster."""
