"""Deployed runs with their lease and open rounds; clients and invitations."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the four tables."""
    op.create_table(
        "deployments",
        sa.Column("run_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uuid", sa.String(32), nullable=False),
        sa.Column("control", sa.String(8), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_deployments_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_deployments")),
        sa.UniqueConstraint("uuid", name=op.f("uq_deployments_uuid")),
    )
    op.create_table(
        "open_rounds",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round_num", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cohort", sa.Text(), nullable=False),
        sa.Column("opened_unix_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_open_rounds_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round_num", "attempt", name=op.f("pk_open_rounds")),
    )
    op.create_table(
        "clients",
        sa.Column("client_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("identity_key", sa.LargeBinary(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("status", sa.String(8), nullable=False),
        sa.Column("enrolled_utc", sa.String(32), nullable=False),
        sa.Column("certificate_expires_utc", sa.String(32), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("client_id", name=op.f("pk_clients")),
        sa.UniqueConstraint("name", name=op.f("uq_clients_name")),
        sa.UniqueConstraint("identity_key", name=op.f("uq_clients_identity_key")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_clients_fingerprint")),
    )
    op.create_table(
        "invitations",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("expires_unix_s", sa.Double(), nullable=False),
        sa.Column("redeemed_by", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_invitations")),
    )


def downgrade() -> None:
    """Drop them all."""
    for table in ("invitations", "clients", "open_rounds", "deployments"):
        op.drop_table(table)
