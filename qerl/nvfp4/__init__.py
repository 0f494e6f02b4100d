"""The NVFP4 number format, once: names and shapes (layout), the plain-torch oracle (reference), the linear (linear).

Importing this package loads no torch; import what you need from its modules.
"""
