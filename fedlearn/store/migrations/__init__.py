"""The revisions of the store's schema, and the upgrade from any of them to the latest.

A new database gets the tables of :mod:`fedlearn.store.schema` without them, so a revision inserts
no rows that a new database needs.
"""

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table

_FOLDER = Path(__file__).parent / "versions"
#: Where Alembic reads the revision of a database, as it would create it.
_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def revisions() -> list[str]:
    """Return the numbers of all revisions, from their file names, with the latest last."""
    return sorted(path.name[1:5] for path in _FOLDER.glob("r*.py"))


def stamp(connection: Connection) -> None:
    """Note that a database has the schema of the latest revision, in the caller's transaction."""
    _VERSION.create(connection, checkfirst=True)
    connection.execute(_VERSION.insert().values(version_num=revisions()[-1]))


def upgrade(connection: Connection) -> None:
    """Bring a database's schema to the latest revision, in the caller's transaction."""
    # Imported late: Alembic takes half a second, and there is seldom anything to upgrade.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "fedlearn.store:migrations")
    config.set_main_option("path_separator", "os")
    command.upgrade(config, "head")
