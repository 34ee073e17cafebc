"""Services and the queue of runs."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the services and the queue."""
    op.create_table(
        "services",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("uuid", sa.String(32), nullable=False),
        sa.Column("control", sa.String(8), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_services")),
        sa.UniqueConstraint("uuid", name=op.f("uq_services_uuid")),
    )
    op.create_table(
        "queue",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("study", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("after", sa.String(64), nullable=False),
        sa.Column("start_from", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("submitted_by", sa.Text(), nullable=False),
        sa.Column("submitted_utc", sa.String(32), nullable=False),
        sa.Column("started_utc", sa.String(32), nullable=False),
        sa.Column("ended_utc", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_queue")),
        sa.UniqueConstraint("name", name=op.f("uq_queue_name")),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("queue")
    op.drop_table("services")
