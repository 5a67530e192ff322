# SPDX-License-Identifier: Apache-2.0
"""The backends. Each module has ``forward``, called with validated arguments, and ``unsupported``, which
returns why the backend cannot serve a call here, or None.
"""
