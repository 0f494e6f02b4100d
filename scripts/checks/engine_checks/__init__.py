"""The checks of scripts/checks/check_engine.py, by what they check: `check(context)` returns numbers for the report."""
