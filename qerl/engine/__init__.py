"""The rollout engines behind one interface."""
