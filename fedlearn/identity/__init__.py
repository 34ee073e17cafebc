"""Client identity: keys, key rotation, invitations, and the registry of enrolled clients."""
