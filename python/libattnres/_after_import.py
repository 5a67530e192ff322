# SPDX-License-Identifier: Apache-2.0
"""Does something when a program imports a module, such as PyTorch, which it may never do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["call"]


class _Finder(MetaPathFinder):
    """Has one module found by the others, and wraps the loader that they name."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module = module
        self.action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module; None for every other one."""
        if name != self.module:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """The loader of the module, and one action after it."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> Any:
        """As the loader itself, for who only looks for the module and does not load it."""
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader itself."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, with nothing of this left to see, then act."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.loader.exec_module(module)
        self.finder.action()


def call(module: str, action: Callable[[], None]) -> None:
    """Run ``action`` right after the first import of a module."""
    sys.meta_path.insert(0, _Finder(module, action))
