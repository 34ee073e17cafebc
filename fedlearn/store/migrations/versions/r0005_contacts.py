"""When clients were last connected, and what they reported about themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create their table."""
    op.create_table(
        "contacts",
        sa.Column("client_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("is_connected", sa.Boolean(), nullable=False),
        sa.Column("seen_utc", sa.String(32), nullable=False),
        sa.Column("software", sa.Text(), nullable=False),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("client_id", name=op.f("pk_contacts")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("contacts")
