"""Programs of other libraries are collected only where these are installed."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("jax") else ["in_jax.py"]
