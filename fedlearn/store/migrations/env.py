"""Where Alembic runs the revisions: on the connection that the store hands over."""

from alembic import context


def run_migrations() -> None:
    """Bring the schema to the revision asked for, in the caller's transaction."""
    context.configure(connection=context.config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()


# Alembic executes this file under the name below; whoever merely imports it (documentation,
# test discovery) has no database at hand.
if __name__ == "env_py":
    run_migrations()
