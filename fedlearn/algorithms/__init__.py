"""The components of a round, such as samplers and aggregations: frozen values, without I/O."""
