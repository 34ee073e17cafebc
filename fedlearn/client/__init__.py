"""The client: what someone with data implements, and the session that speaks for it."""
