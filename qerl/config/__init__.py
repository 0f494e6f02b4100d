"""The configuration of a run: its keys, the rules between them, and the recipes that set them. No torch."""
