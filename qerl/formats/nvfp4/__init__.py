"""The NVFP4 number format: tensor names and shapes (layout), the plain torch oracle (reference), the linear (linear).

Importing this package does not load torch; import what you need from its modules.
"""
