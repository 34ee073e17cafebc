"""The lineage of each client's identity key."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; for existing clients, which never rotated, it holds just the key."""
    # Nullable at first: a table with rows takes no NOT NULL column without a default.
    op.add_column("clients", sa.Column("lineage", sa.LargeBinary(), nullable=True))
    op.execute(sa.text("UPDATE clients SET lineage = identity_key"))
    with op.batch_alter_table("clients") as table:  # SQLite changes no column in place
        table.alter_column("lineage", existing_type=sa.LargeBinary(), nullable=False)


def downgrade() -> None:
    """Drop it."""
    op.drop_column("clients", "lineage")
