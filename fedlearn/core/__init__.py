"""Values everything else is built from: parameters, messages, time, randomness."""
