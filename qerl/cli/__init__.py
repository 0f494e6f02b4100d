"""The options of each command, and what every command does around its work. Nothing here imports torch."""
