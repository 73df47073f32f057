"""Packages that torch imports late, imported by a thread while the main thread imports torch.

Where files are slow, an import mostly waits for them, so two imports at a time take little longer than one.
"""

from __future__ import annotations

import contextlib
import importlib
import threading

PACKAGES = ("sympy", "networkx")
"""What `torch._dynamo` and `torch._inductor` need. They import nothing of torch: no two threads wait for each other."""


def preload() -> None:
    """Begin to import the packages."""
    threading.Thread(target=_import_all, name="preload", daemon=True).start()


def _import_all() -> None:
    for name in PACKAGES:
        with contextlib.suppress(Exception):  # torch says what is wrong when it needs the package
            importlib.import_module(name)
