"""A preset applied to a whole dump, token by token."""

from offpol_diag.engine import segments
from offpol_diag.trainers.tokens import Tokens


def effect(context, preset):
    """Apply a preset to the whole batch, token by token."""
    return Tokens(context, preset)


def token_mask(done):
    """Return 1 where a token is kept, [T] float64."""
    return segments.numbers(done.kept)
