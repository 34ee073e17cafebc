"""The history of the store's schema, as Alembic revisions."""
