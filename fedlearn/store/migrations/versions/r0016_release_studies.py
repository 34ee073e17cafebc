"""The study of each release, which outlives its run."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# By the creation, too: another run may have had the name.
_FILL = """
UPDATE releases SET study = COALESCE(
    (SELECT runs.study FROM runs
     WHERE runs.name = releases.run AND runs.created_utc = releases.run_created_utc), '')
"""


def upgrade() -> None:
    """Add the column; a release whose run has been deleted has no study."""
    column = sa.Column("study", sa.String(64), nullable=False, server_default="")
    op.add_column("releases", column)
    op.execute(sa.text(_FILL))


def downgrade() -> None:
    """Drop it."""
    with op.batch_alter_table("releases") as releases:
        releases.drop_column("study")
