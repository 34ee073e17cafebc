"""Alembic's environment: runs the revisions on the connection passed in by the store."""

from alembic import context


def run_migrations() -> None:
    """Bring the schema to the requested revision, in the caller's transaction."""
    context.configure(connection=context.config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()


# Alembic executes this file under the name below. Tools that merely import it, such as
# documentation or test discovery, have no database.
if __name__ == "env_py":
    run_migrations()
