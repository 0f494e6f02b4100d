"""The checks of scripts/checks/check_engine.py, by topic. Each is a function of the context, and returns numbers."""
