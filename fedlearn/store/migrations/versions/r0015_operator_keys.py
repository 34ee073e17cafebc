"""The key of an operator's newest certificate, with which a renewal may be repeated."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; operators that joined earlier have it from their next renewal on."""
    column = sa.Column("key_sha256", sa.String(64), nullable=False, server_default="")
    op.add_column("operators", column)


def downgrade() -> None:
    """Drop it."""
    with op.batch_alter_table("operators") as operators:
        operators.drop_column("key_sha256")
