"""One round and a run of them, wherever the clients are."""
