"""What each client ran in each round: a bundle, or the site's own trainer."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "trainers",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round_num", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("trainer", sa.String(100), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_trainers_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round_num", "client_id", name=op.f("pk_trainers")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("trainers")
