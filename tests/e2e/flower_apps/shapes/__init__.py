"""Apps written for Flower alone: they import nothing of fedlearn."""
