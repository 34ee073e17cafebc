"""Training in the coordinator, or in a silo, over processes: data-parallel, sharded, cut in parts.

The degrees of a :class:`~fedlearn.parallel.mesh.Mesh` say how a model is spread; one loop trains
it on every mesh, in steps that are functions of the seed and their number.
"""
