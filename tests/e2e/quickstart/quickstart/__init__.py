"""An app written for Flower alone: it imports nothing of fedlearn."""
