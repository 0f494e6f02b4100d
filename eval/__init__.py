"""Step 3: measure a model on a task, on the engine that training samples with."""

import qerl  # noqa: F401 (before any library: it switches their telemetry off)
