"""The study of a run, and the weights that it starts from."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both columns; earlier runs have neither."""
    op.add_column("runs", sa.Column("study", sa.String(64), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("start_from", sa.Text(), nullable=False, server_default="{}"))


def downgrade() -> None:
    """Drop them."""
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("start_from")
        runs.drop_column("study")
