"""What a configuration must lead to, in plain float64 torch, by the documentation and papers.

It shares no code with fedlearn and does not import it (``tests/architecture/test_oracle.py``).
Speed does not matter here: one client, one step, one tensor at a time. Read it in this order:

- :mod:`~tests.oracle.reference.model`: losses and gradients of a torch module;
- :mod:`~tests.oracle.reference.privacy`: clips, noise, and the release of a sum;
- :mod:`~tests.oracle.reference.client`: local training, by algorithm and optimizer;
- :mod:`~tests.oracle.reference.server`: from contributions to the next global model;
- :mod:`~tests.oracle.reference.measures`: evaluation;
- :mod:`~tests.oracle.reference.policies`: when rounds close;
- :mod:`~tests.oracle.reference.run`: consecutive rounds, and which clients count in each;
- :mod:`~tests.oracle.reference.refusals`: which configurations must be refused, and why.
"""
