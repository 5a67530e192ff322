# SPDX-License-Identifier: Apache-2.0
"""Puts a function of ours in the place of an engine's, at the moment the engine imports it.

An engine loads its plugins before it knows the model, and importing the module of an operator there would
import the model with it. So modules are found on disk, and changed right after they were executed: whoever
imports the function then finds the replacement.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from libattnres import _after_import, _core

__all__ = ["Engine", "Function", "install"]

Replace = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From the engine's function to the one that takes its place."""


@dataclass(frozen=True)
class Function:
    """A function or method of an engine, and what it must look like to be replaced."""

    name: str
    """In its module, as ``"attn_res"`` or ``"AttnResidual.forward"``."""
    parameters: tuple[str, ...]
    replace: Replace | None
    """None for one that the replacements call."""


@dataclass(frozen=True)
class Engine:
    """What is replaced in an engine: all functions of one module, or none."""

    name: str
    package: str
    module: str
    functions: tuple[Function, ...]
    variable: str
    """Environment variable that switches the plugin off."""
    logger: logging.Logger
    """One that the engine shows."""


def install(engine: Engine) -> None:
    """Replace the functions of an engine, now or when it imports them. Never raises; the log says what was
    done and why not.
    """
    value = os.environ.get(engine.variable, "")
    if value == "0":
        engine.logger.info("libattnres: off (%s=0), %s is left as it is", engine.variable, engine.name)
        return
    if value not in ("", "1"):
        leave(engine, f"{engine.variable}: expected 0 or 1, got {value!r}")
        return
    loaded = sys.modules.get(engine.module)
    if loaded is not None:
        replace(engine, loaded)
        return
    if not is_on_disk(engine.module):
        has_package = is_on_disk(engine.package)
        leave(engine, f"it has no module {engine.module}" if has_package else "it is not installed")
        return
    _after_import.call(engine.module, lambda: replace(engine, sys.modules[engine.module]))
    engine.logger.info("libattnres %s: waits for %s", _core.version(), engine.module)


def leave(engine: Engine, reason: str) -> None:
    """Say that the engine stays as it is."""
    engine.logger.warning(
        "libattnres %s: %s %s is left as it is: %s",
        _core.version(),
        engine.name,
        engine_version(engine),
        reason,
    )


def engine_version(engine: Engine) -> str:
    """Of the installed distribution, which is named as its package."""
    try:
        return metadata.version(engine.package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def is_on_disk(module: str) -> bool:
    """Whether a module can be found, without importing any of its packages."""
    path: Sequence[str] | None = None
    parent = ""
    for part in module.split("."):
        parent = f"{parent}.{part}" if parent else part
        loaded = sys.modules.get(parent)
        if loaded is not None and hasattr(loaded, "__path__"):
            path = list(loaded.__path__)
            continue
        spec = importlib.machinery.PathFinder.find_spec(parent, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations or []
    return True


def replace(engine: Engine, module: ModuleType) -> None:
    """Replace the functions in a module, and where other modules of the engine already hold them."""
    originals = {}
    for function in engine.functions:
        owner, attribute = owner_of(module, function.name)
        original = getattr(owner, attribute, None)
        reason = mismatch(original, function)
        if reason is not None:
            leave(engine, f"{engine.module}.{function.name}: {reason}")
            return
        originals[function.name] = original
    replaced = []
    for function in engine.functions:
        original = originals[function.name]
        if function.replace is None or original is None or hasattr(original, "__libattnres__"):
            continue
        replacement = function.replace(original)
        replacement.__dict__["__libattnres__"] = _core.version()
        replacement.__dict__["__wrapped__"] = original
        owner, attribute = owner_of(module, function.name)
        setattr(owner, attribute, replacement)
        for other in list(sys.modules.values()):
            if isinstance(other, ModuleType) and other.__name__.partition(".")[0] == engine.package:
                for key, value in list(vars(other).items()):
                    if value is original:
                        setattr(other, key, replacement)
        replaced.append(function.name)
    if replaced:
        engine.logger.info(
            "libattnres %s: replaced %s of %s (%s %s); %s=0 switches this off",
            _core.version(),
            " and ".join(replaced),
            engine.module,
            engine.name,
            engine_version(engine),
            engine.variable,
        )


def owner_of(module: ModuleType, name: str) -> tuple[Any, str]:
    """The module or class that holds a function, and its name there."""
    owner: Any = module
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute


def mismatch(original: Any, function: Function) -> str | None:
    """Why a function is not the one that is known here, or None."""
    if original is None:
        return "not there"
    try:
        parameters = tuple(inspect.signature(original).parameters)
    except (TypeError, ValueError):
        return "not a function with a signature"
    if parameters != function.parameters:
        return f"expected parameters ({', '.join(function.parameters)}), got ({', '.join(parameters)})"
    return None
