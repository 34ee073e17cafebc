"""The configuration of a run, its software versions, checkpoints and files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fedlearn.config.tables import Use, tables_with
from fedlearn.core.json_values import iterate_leaves
from fedlearn.dashboard.rendering import RequestQuery, dashboard_of
from fedlearn.dashboard.run_page import RunHead
from fedlearn.experiment.comparison import differences

#: Modes of tables that are not worth opening.
_OFF = ("off", "drop")


def _show_record(request: Request) -> Response:
    dashboard, query = dashboard_of(request), RequestQuery(request, "with")
    name, other = request.path_params["name"], query.text("with")
    head, database = RunHead.of(dashboard, name), dashboard.database
    record = head.record
    compared = database.run(other).record if other else None
    changed = {} if compared is None else differences(record.config, compared.config)
    return dashboard.render(
        request,
        "record.html",
        **head._asdict(),
        tables=list(_read_tables(record.config, changed)),
        other=compared,
        changed=changed,
        checkpoints=list(reversed(database.run(name).checkpoints())),
    )


@dataclass(frozen=True)
class _Table:
    """A table of the configuration; that of single keys has no name.

    Attributes:
        settings: Texts by key.
        is_open: Whether the page shows it without a click.
        num_changed: Settings that another run has set otherwise.
    """

    name: str
    settings: Mapping[str, str]
    is_open: bool
    num_changed: int

    def full_name(self, key: str) -> str:
        """Return the dotted name of a setting."""
        return f"{self.name}.{key}" if self.name else key


def _read_tables(config: Mapping[str, object], changed: Mapping[str, object]) -> Iterator[_Table]:
    """Yield the single keys, then the tables; of these, the ones that `fedlearn show` prints."""
    single = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    for name, values in {"": single, **nested}.items():
        settings = {key: _text(value) for key, value in iterate_leaves(values)}
        is_shown = name in ("", *tables_with(Use.SHOWN)) and values.get("mode") not in _OFF
        table = _Table(name, settings, is_open=is_shown, num_changed=0)
        num_changed = sum(table.full_name(key) in changed for key in settings)
        if settings:
            is_open = num_changed > 0 if changed else is_shown
            yield replace(table, num_changed=num_changed, is_open=is_open)


def _text(value: object) -> str:
    """Format a setting as JSON, without the quotes of a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ROUTES: Sequence[BaseRoute] = (Route("/runs/{name}/record", _show_record),)
