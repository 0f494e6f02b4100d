"""The model that is trained, and its log probabilities over packed rows."""
