"""On-policy distillation: the student samples, a 16-bit teacher says how likely each token would be to it."""
