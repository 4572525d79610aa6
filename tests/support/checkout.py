"""Where this checkout is, and processes that import it, whatever else is installed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.context import BaseContext
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: this checkout and the helpers of its tests come first; one thread."""
    paths = os.pathsep.join([str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | extra


def start(*arguments: object, **options) -> subprocess.Popen:
    """Start this Python on the checkout, without waiting for it."""
    env = environment(**options.pop("extra", {}))
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=env, **options)


def python(*arguments: object, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
    """Run this Python on the checkout; what it prints is kept. A failure shows its standard error."""
    env = environment(**options.pop("extra", {}))
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, check=False, **options)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def forkserver() -> BaseContext:
    """Starts processes as forks of one that has imported what takes them longest, and done nothing else; it serves all tests."""
    heavy = ["torch.distributed.fsdp", "compresskit.quant", "compresskit.prune", "compresskit.search"]
    multiprocessing.set_forkserver_preload(heavy)
    return multiprocessing.get_context("forkserver")
