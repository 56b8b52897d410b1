"""Plans that `engine="fastest"` has measured, in a file of the user's cache folder: the next run takes the same one.

So the measurement is made once for a model, a number of nodes, a batch and a processor, and a script that is run again
gives the same bits. Deleting the file has everything measured again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.core import tree
from vecgym.core.files import write_atomically
from vecgym.engine.plan import Plan


def cache_file() -> Path:
    """`fastest.json` in the folder `$VECGYM_CACHE`; else in `vecgym` in the user's cache folder."""
    system = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    folder = os.environ.get("VECGYM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or system) / "vecgym"
    return Path(folder) / "fastest.json"


def key_of(model: nn.Module, batch: Any, num_threads: int) -> str:
    """What a measurement depends on, as one word.

    >>> batch = torch.zeros(4, 8, 2)
    >>> key = key_of(nn.Linear(2, 1), batch, num_threads=2)
    >>> key_of(nn.Linear(2, 1), batch + 1, num_threads=2) == key, key_of(nn.Linear(2, 1), batch[:2], 2) == key
    (True, False)
    """
    tensors = {name: _form(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    forms = [_form(x) for x in tree.leaves(batch)]
    facts = [name, repr(model), tensors, forms, processor(device), num_threads, torch.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def processor(device: torch.device) -> str:
    """The name of what computes, such as "AMD EPYC", and how many of them."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{os.cpu_count()} x {', '.join(sorted(names)) or platform.processor() or platform.machine()}"


def recall(key: str, possible: list[Plan]) -> Plan | None:
    """The plan that was measured for `key`, if it is one of those that are possible now; its reason says so."""
    entry = _entries().get(key)
    if not isinstance(entry, dict):
        return None
    for plan in possible:
        if _choice(plan) == entry.get("plan"):
            return replace(plan, reason=f"fastest when measured on {entry.get('date')}; remembered in {cache_file()}")
    return None


def remember(key: str, plan: Plan) -> None:
    """Write a plan down; a cache that cannot be written is none."""
    entry = {
        "plan": _choice(plan),
        "date": datetime.datetime.now().astimezone().date().isoformat(),
    }
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(cache_file(), "w") as file:
            json.dump(_entries() | {key: entry}, file, indent=1)
    except OSError:
        pass


def _choice(plan: Plan) -> list[Any]:
    return [plan.engine, plan.node_threads, plan.chunk_size, plan.channels_last]


def _entries() -> dict[str, Any]:
    try:
        entries = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _form(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"
