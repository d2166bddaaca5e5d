"""Imported first by the server that workers are forked from: nothing of what it imports next is garbage.

The collector would look through all of it again and again, a fifth of the time until the first worker starts.
Workers have it again (`engines/worker.py`).
"""

from __future__ import annotations

import gc

gc.disable()
