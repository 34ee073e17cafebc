"""Recurring runs."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schedules."""
    op.create_table(
        "schedules",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("study", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_utc", sa.String(32), nullable=False),
        sa.Column("due_unix_s", sa.Double(), nullable=False),
        sa.Column("num_runs", sa.Integer(), nullable=False),
        sa.Column("last_run", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_schedules")),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("schedules")
