"""A preset applied to a whole dump, token by token."""

from offpol_diag.analysis.first_pass import FirstPass, Needs, read_ahead
from offpol_diag.analysis.study import Study
from offpol_diag.dump.read import open_dump
from offpol_diag.engine import segments
from offpol_diag.engine.scope import NO_FITS
from offpol_diag.presets import catalogue
from offpol_diag.run.threads import Threads
from offpol_diag.trainers.tokens import Tokens
from tests import oracles

ALL = catalogue.load().resolve("all")


def opened(rows, folder, presets=ALL):
    """Open a dump: its study, its cuts and tails, and all of it as one batch."""
    path = oracles.write(rows, folder / "dump.parquet")
    dump = open_dump([path], batch_tokens=10**6)
    study = Study.of(dump.info.columns, presets, (), 0)
    asked = Needs.of(study.presets, False)
    found = read_ahead(Threads(1), dump, asked) if asked else FirstPass(NO_FITS, None)
    (batch,) = dump.batches()
    return study, found, batch


def effect(context, preset):
    """Apply a preset to the whole batch, token by token."""
    return Tokens(context, preset)


def token_mask(done):
    """Return 1 where a token is kept, [T] float64."""
    return segments.numbers(done.kept)
