"""The engine that samples with transformers, on a CPU or a card."""
