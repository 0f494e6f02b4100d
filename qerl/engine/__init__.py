"""The rollout engines behind one interface.

`interface`, `options`, `update` and `memory` know no engine; `transformers` and `vllm` import them; `open`
and `loaded_base` are on top.
"""
