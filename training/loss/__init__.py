"""What surrounds TRL's loss: advantages, importance weights, micro-batches and checks on the result."""
