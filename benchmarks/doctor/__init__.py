"""How often the diagnosis names the right cause: faults made on rollouts of small models."""
