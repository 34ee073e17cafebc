"""What a configuration means, in plain float64 torch, from the documentation and the papers.

It shares no code with fedlearn and does not import it (``tests/architecture/test_oracle.py``).
Speed does not matter here: one client, one step, one tensor at a time. Read it in this order:

- :mod:`~tests.oracle.reference.model`: losses and gradients of a torch module;
- :mod:`~tests.oracle.reference.privacy`: clips, noise, and what is released of a sum;
- :mod:`~tests.oracle.reference.client`: local training, by algorithm and optimizer;
- :mod:`~tests.oracle.reference.server`: from contributions to the next global model;
- :mod:`~tests.oracle.reference.measures`: evaluation;
- :mod:`~tests.oracle.reference.policies`: when rounds close;
- :mod:`~tests.oracle.reference.run`: who counts in a round, and rounds one after another;
- :mod:`~tests.oracle.reference.refusals`: what must not start, and why.
"""
