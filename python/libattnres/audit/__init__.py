# SPDX-License-Identifier: Apache-2.0
"""What the machine code of the compiled kernels says; no GPU, but NVIDIA's disassemblers from PyPI."""
