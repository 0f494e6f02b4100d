"""What a folder or hub id holds, and how its weights and adapters are read."""
