"""The coordinator's side of the network: gRPC, enrolment, transfers."""
