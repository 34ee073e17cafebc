"""The audit log, and signed checkpoints of it."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "audit_log",
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_utc", sa.String(32), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_audit_log")),
        sa.UniqueConstraint("previous", name=op.f("uq_audit_log_previous")),
    )
    op.create_table(
        "audit_checkpoints",
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("at_utc", sa.String(32), nullable=False),
        sa.Column("public_key", sa.String(64), nullable=False),
        sa.Column("signature", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_audit_checkpoints")),
    )


def downgrade() -> None:
    """Drop both."""
    for table in ("audit_checkpoints", "audit_log"):
        op.drop_table(table)
