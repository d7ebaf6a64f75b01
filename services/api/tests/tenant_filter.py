"""Watches every query of every test: one that runs for somebody must ask for that somebody's tenant.

Each table of a statement that has a tenant must have it compared in the statement, whatever else is asked: a filter that
a query forgets is then found by any test that runs the query, not only by one that looks for it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, event
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression
from sqlalchemy.sql.schema import Column

from aerie_api.auth import CALLER
from aerie_api.tables import Base

WITH_TENANT = {t for t in Base.metadata.tables.values() if "tenant" in t.c and t.name not in ("audit", "api_keys")}
"""Keys and the audit log are read by the operator only, who sees all tenants."""


class TenantFilterMissing(AssertionError):
    """A query for somebody would find what is somebody else's."""


def unfiltered(statement: Any) -> set[str]:
    """The tables of `statement` that have a tenant which it does not compare."""
    used, compared = set[Table](), set[Table]()
    for element in visitors.iterate(statement):
        if isinstance(element, Table) and element in WITH_TENANT:
            used.add(element)
        elif isinstance(element, Column) and isinstance(element.table, Table) and element.table in WITH_TENANT:
            used.add(element.table)
        if isinstance(element, BinaryExpression) and element.operator is operators.eq:
            for side in (element.left, element.right):
                column = getattr(side, "name", None)
                if column == "tenant" and isinstance(table := getattr(side, "table", None), Table):
                    compared.add(table)
    return {table.name for table in used - compared}


@event.listens_for(Session, "do_orm_execute")
def check(state: ORMExecuteState) -> None:
    """Raise TenantFilterMissing for a query for somebody that asks for everybody's rows."""
    if CALLER.get() is None or state.is_insert or state.is_column_load:
        return
    if state.execution_options.get("across_tenants"):  # said where the query is written
        return
    if missing := unfiltered(state.statement):
        raise TenantFilterMissing(f"{sorted(missing)} without a tenant in: {state.statement}")
