"""Operators with certificates, and their roles."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "operators",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.String(8), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("certificate_expires_utc", sa.String(32), nullable=False),
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("token_expires_unix_s", sa.Double(), nullable=False),
        sa.Column("redeemed_by", sa.String(64), nullable=False),
        sa.Column("added_by", sa.Text(), nullable=False),
        sa.Column("added_utc", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_operators")),
    )
    op.create_table(
        "operator_grants",
        sa.Column("operator", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("study", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["operator"], ["operators.name"], name=op.f("fk_operator_grants_operator")
        ),
        sa.PrimaryKeyConstraint("operator", "role", "study", name=op.f("pk_operator_grants")),
    )


def downgrade() -> None:
    """Drop both."""
    for table in ("operator_grants", "operators"):
        op.drop_table(table)
