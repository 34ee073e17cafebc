"""The registry of models."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "releases",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("run_created_utc", sa.String(32), nullable=False),
        sa.Column("num_rounds", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_utc", sa.String(32), nullable=False),
        sa.Column("statement", sa.Text(), nullable=False),
        sa.Column("public_key", sa.String(64), nullable=False),
        sa.Column("signature", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_releases")),
        sa.UniqueConstraint("id", name=op.f("uq_releases_id")),
    )
    op.create_table(
        "release_tags",
        sa.Column("tag", sa.String(64), nullable=False),
        sa.Column("release_id", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["release_id"], ["releases.id"], name=op.f("fk_release_tags_release_id")
        ),
        sa.PrimaryKeyConstraint("tag", name=op.f("pk_release_tags")),
    )


def downgrade() -> None:
    """Drop both."""
    for table in ("release_tags", "releases"):
        op.drop_table(table)
