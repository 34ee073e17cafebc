"""How a block of clients is trained: one after another, or stacked in one tensor operation.

To float rounding all executors agree; the sequential one is the reference.
"""
