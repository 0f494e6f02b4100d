"""Supervised fine-tuning: given conversations, of which the assistant's tokens are learned."""
