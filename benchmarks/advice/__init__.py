"""Proof that the advice is good: worlds in which the true gradient is known, and what advice does in them."""
