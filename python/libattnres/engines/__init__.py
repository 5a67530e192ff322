# SPDX-License-Identifier: Apache-2.0
"""Plugins for inference engines: their Attention Residuals, served by libattnres.

The engines find them by the entry points of the installed package; nothing here imports an engine.
"""
