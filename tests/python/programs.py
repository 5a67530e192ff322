# SPDX-License-Identifier: Apache-2.0
"""Programs in a process of their own: what needs a cold start, or leaves a broken process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(program: str, **environment: str) -> str:
    """Run Python source, which may import the tests' own modules; it must succeed. Returns its output."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=900,  # a hang, on however busy a machine
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
