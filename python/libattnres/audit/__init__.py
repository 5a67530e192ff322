# SPDX-License-Identifier: Apache-2.0
"""What the machine code of the compiled kernels says, without a GPU: needs NVIDIA's disassembler from PyPI."""
