"""Step 3: measure a model on a task, on the engine that training samples with."""
