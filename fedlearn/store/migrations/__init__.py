"""The revisions of the store's schema, and the upgrade from any of them to the latest."""

from pathlib import Path

from sqlalchemy import Connection

_FOLDER = Path(__file__).parent / "versions"


def revisions() -> list[str]:
    """Return the numbers of all revisions, from their file names, with the latest last."""
    return sorted(path.name[1:5] for path in _FOLDER.glob("r*.py"))


def upgrade(connection: Connection) -> None:
    """Bring a database's schema to the latest revision, in the caller's transaction."""
    # Imported late: Alembic takes half a second, and there is seldom anything to upgrade.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "fedlearn.store:migrations")
    config.set_main_option("path_separator", "os")
    command.upgrade(config, "head")
