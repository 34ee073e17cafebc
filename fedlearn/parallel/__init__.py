"""Train one model in several processes, in the coordinator or in a client.

The degrees of a :class:`~fedlearn.parallel.mesh.Mesh` choose between data, sharded, tensor and
pipeline parallelism. The same loop trains on every mesh; what is random in a step depends only on
the seed and the step's number.
"""
