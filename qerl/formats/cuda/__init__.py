"""Our CUDA sources, and what compiles, launches and times them and describes matrices to the copy engine."""
