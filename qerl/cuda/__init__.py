"""CUDA sources, and how they are compiled, described to the copy engine, timed and launched."""
