import qerl  # noqa: F401 (before any library: it switches their telemetry off)
