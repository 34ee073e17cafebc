"""Studies and their clients."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "studies",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("epsilon", sa.Double(), nullable=True),
        sa.Column("target_delta", sa.Double(), nullable=True),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_utc", sa.String(32), nullable=False),
        sa.Column("closed_utc", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_studies")),
    )
    op.create_table(
        "study_members",
        sa.Column("study", sa.String(64), nullable=False),
        sa.Column("client", sa.String(64), nullable=False),
        sa.Column("invited_utc", sa.String(32), nullable=False),
        sa.Column("consent", sa.String(16), nullable=False),
        sa.Column("consent_utc", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("study", "client", name=op.f("pk_study_members")),
        sa.ForeignKeyConstraint(["study"], ["studies.name"], name=op.f("fk_study_members_study")),
    )


def downgrade() -> None:
    """Drop both."""
    op.drop_table("study_members")
    op.drop_table("studies")
