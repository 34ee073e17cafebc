"""Basic values that the rest of fedlearn is built on: parameters, messages, time, randomness."""
