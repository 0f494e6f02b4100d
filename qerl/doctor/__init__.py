"""`qerl doctor`: what this machine has and which kernels work on it."""
