"""A fedlearn run on a Flower federation."""
