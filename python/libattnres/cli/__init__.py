# SPDX-License-Identifier: Apache-2.0
"""The command line ``libattnres``.

One module per command, each with ``HELP``, ``add_arguments`` and ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import libattnres

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    "info",
    "explain",
    "permutations",
    "demo",
    "verify",
    "bench",
    "walk",
    "report",
    "tune",
    "certify",
    "model",
)

# What a C or C++ build asks for: option, folder inside the package, help.
FOLDERS = (
    ("--cmake-dir", "lib/cmake/attnres", "print the folder of the CMake package, for attnres_DIR, and exit"),
    ("--include-dir", "include", "print the folder that holds attnres/attnres.h, and exit"),
    ("--pkg-config-dir", "lib/pkgconfig", "print the folder of attnres.pc, for PKG_CONFIG_PATH, and exit"),
)


class _PrintFolder(argparse.Action):
    """Print a folder of the package and exit, as ``--version`` does with the version."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        # An editable install has several folders, and only one of them holds what was built.
        roots = [Path(root) for root in libattnres.__path__]
        found = next((root / self.const for root in roots if (root / self.const).is_dir()), None)
        if found is None:
            parser.error(f"{option}: expected {self.const} in {roots[0]}, found nothing there")
        print(found)
        parser.exit()


def build_options() -> argparse.ArgumentParser:
    """A parser without commands: what it answers needs no PyTorch, as C and C++ programs need none."""
    parser = argparse.ArgumentParser(
        prog="libattnres",
        description="Attention Residuals forward: what runs here, whether it is right, and how fast.",
    )
    parser.add_argument("--version", action="version", version=f"libattnres {libattnres.__version__}")
    for option, folder, text in FOLDERS:
        parser.add_argument(option, action=_PrintFolder, nargs=0, const=folder, help=text)
    return parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = build_options()
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"libattnres.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.add_argument(
            "--json", metavar="FILE", type=Path, help="also write the results there, with metadata"
        )
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 when everything it checked was right."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in {"--version", *(option for option, _, _ in FOLDERS)}:
        build_options().parse_args(arguments)  # prints and exits

    try:
        from libattnres.cli.console import Console
        from libattnres.cli.metadata import write_json
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("libattnres: commands need PyTorch (pip install torch), the folders do not", file=sys.stderr)
        return 2

    args = build_parser().parse_args(arguments)
    console = Console()
    try:
        status, results = args.run(args, console)
        if args.json is not None:
            write_json(args.json, args.command, results)
    except (ValueError, TypeError, OSError, libattnres.UnsupportedError) as error:
        print(f"libattnres {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return int(status)
