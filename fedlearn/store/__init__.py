"""The record of runs and deployments: SQLAlchemy, Alembic, checkpoints."""
