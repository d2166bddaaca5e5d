"""Imported last by the server that workers are forked from: what is there by then stays in shared memory.

The garbage collector writes to every object it looks at, and a page that is written to is copied.
"""

from __future__ import annotations

import gc

gc.freeze()
