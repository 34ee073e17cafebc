"""How a block of clients is trained: one after another, or stacked in one tensor operation.

Every executor turns the same :class:`~fedlearn.simulation.executors.base.Work` into the same
:class:`~fedlearn.simulation.executors.base.Trained`, to float rounding; the sequential one is
the reference.
"""
