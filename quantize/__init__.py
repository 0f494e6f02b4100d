"""Step 1, offline: a 16-bit checkpoint becomes NVFP4 by llm-compressor, and is verified. Entry: quantize/run.py."""
