"""Who a client is: keys, how one follows from another, and whose they are."""
