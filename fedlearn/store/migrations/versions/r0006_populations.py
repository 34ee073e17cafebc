"""Sketches of the examples that a privacy ledger was charged for."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the sketches of examples."""
    op.create_table(
        "privacy_examples",
        sa.Column("population", sa.String(160), nullable=False),
        sa.Column("users", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("sketch", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("population", "users", "digest", name=op.f("pk_privacy_examples")),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("privacy_examples")
