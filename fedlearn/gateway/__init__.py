"""The coordinator's network side: the gRPC server, enrolment, and transfers."""
