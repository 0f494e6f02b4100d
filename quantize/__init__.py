"""Step 1, offline: turn a 16-bit checkpoint into a quantized one, and verify it. Entry: quantize/run.py."""

import qerl  # noqa: F401 (before any library: it switches their telemetry off)
