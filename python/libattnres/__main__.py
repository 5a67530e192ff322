# SPDX-License-Identifier: Apache-2.0
"""``python -m libattnres``: the command line."""

from libattnres.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
