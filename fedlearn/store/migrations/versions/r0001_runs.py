"""Runs, their rounds, participations, metrics and checkpoints."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the five tables."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("created_utc", sa.String(32), nullable=False),
        sa.Column("num_rounds", sa.Integer(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.String(64), nullable=False),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_table(
        "rounds",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round_num", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.SmallInteger(), nullable=False),
        sa.Column("train_loss", sa.Double(), nullable=True),
        sa.Column("duration_s", sa.Double(), nullable=True),
        sa.Column("virtual_s", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rounds_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round_num", name=op.f("pk_rounds")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "participations",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round_num", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=True),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "round_num"],
            ["rounds.run_id", "rounds.round_num"],
            name=op.f("fk_participations_run_id"),
        ),
        sa.PrimaryKeyConstraint("run_id", "round_num", "position", name=op.f("pk_participations")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round_num", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "round_num"],
            ["rounds.run_id", "rounds.round_num"],
            name=op.f("fk_metrics_run_id"),
        ),
        sa.PrimaryKeyConstraint("run_id", "round_num", "name", name=op.f("pk_metrics")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round_num", sa.Integer(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round_num", name=op.f("pk_checkpoints")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop them all."""
    for table in ("checkpoints", "metrics", "participations", "rounds", "runs"):
        op.drop_table(table)
