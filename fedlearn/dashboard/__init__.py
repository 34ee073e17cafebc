"""Read-only web pages about runs and clients, for `fedlearn dashboard`.

Each module with a ``ROUTES`` is one page, or one group of pages, and :mod:`fedlearn.dashboard.app`
lists them all. Pages read the database through :mod:`fedlearn.store`, and render a template of the
folder ``templates``. Scripts and styles are in ``static``; nothing is loaded from elsewhere.
"""
