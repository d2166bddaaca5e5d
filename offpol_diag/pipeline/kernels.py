"""When presets are computed by the compiled pass, and where its machine code is kept."""

from __future__ import annotations

import hashlib
import logging
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

WORTH_LOADING = 300_000
"""Tokens from which loading the compiled pass, about a second, pays for `MANY` presets."""
WORTH_COMPILING = 3_000_000
"""The same where it must first be compiled, about half a minute, once."""
MANY, ALONE = 207, 20
"""Presets that those numbers are of, and how many of them what does not depend on presets costs."""


@cache
def folder() -> Path:
    """Return where the machine code is kept, by a hash of all sources of the pipeline.

    numba looks at the source of the compiled function alone: it would go on using an old formula.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "offpol-diag" / digest


def compiled(tokens: float, presets: int) -> bool:
    """Return whether so many tokens and presets are worth the compiled pass; compile it where it is not yet.

    False where the machine code cannot be kept, or numba is not installed.
    """
    work = tokens * (presets + ALONE) / (MANY + ALONE)
    if work < WORTH_LOADING:
        return False
    known = any(folder().glob("**/*.nbc")) if folder().is_dir() else False
    if not known and (work < WORTH_COMPILING or not _writable(folder())):
        return False
    if find_spec("numba") is None:
        return False
    if not known:
        logging.getLogger("offpol_diag").warning(
            "compiling the formulas of the presets for this machine, about half a minute, once"
        )
        from offpol_diag.pipeline import compiled as compiled_pass

        compiled_pass.compile_all()
    return True


def worth_a_gpu(tokens: float, presets: int) -> bool:
    """Return whether there is work enough to start a GPU, which takes some seconds in every worker."""
    return tokens * (presets + ALONE) / (MANY + ALONE) >= WORTH_COMPILING


def _writable(path: Path) -> bool:
    """Return whether files can be written to a folder, which is made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)
