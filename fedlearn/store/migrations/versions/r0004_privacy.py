"""The ledger of privacy charges."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the ledger."""
    op.create_table(
        "privacy_charges",
        sa.Column("population", sa.String(160), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("round_num", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("sampling", sa.String(8), nullable=False),
        sa.Column("num_users", sa.BigInteger(), nullable=False),
        sa.Column("expected", sa.BigInteger(), nullable=False),
        sa.Column("largest", sa.BigInteger(), nullable=False),
        sa.Column("noise_multiplier", sa.Double(), nullable=False),
        sa.Column("clip_norm", sa.Double(), nullable=False),
        sa.Column("charged_utc", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("population", "position", name=op.f("pk_privacy_charges")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("privacy_charges")
