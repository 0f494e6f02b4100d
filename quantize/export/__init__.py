"""`qerl export`: the model that a run with whole weights has trained, in 4 or in 16 bits."""
