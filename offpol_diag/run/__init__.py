"""Where an analysis runs: this process, worker processes, the GPUs of this machine, a Ray cluster."""
