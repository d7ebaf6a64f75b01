"""How a tenant stands against the bytes that it may keep in the store.

Its own limit counts (`tenants.store_bytes`), else the one that the operator gives everybody (`AERIE_TENANT_STORE_BYTES`).
What is held is what its committed results hold, of whatever stage. A commit is never refused for it: what was computed
counts, and what follows waits. So the limit is looked at where something new would begin (`leases.planner`), and after
that by the watch of `storage.room`, which lets idle states go before anybody waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from aerie_api.storage.repository import StorageRepository
from eagle3_core.objects.protocol import StoreFull


@dataclass(frozen=True)
class Budget:
    """What a limited tenant holds, and what it may hold."""

    tenant: str
    held_bytes: int
    limit_bytes: int

    def excess(self, needed_bytes: int = 0) -> int:
        """Bytes that are too many once `needed_bytes` more are held; 0 or less where they fit."""
        return self.held_bytes + needed_bytes - self.limit_bytes

    def reason(self, needed_bytes: int = 0) -> StoreFull:
        """Why jobs of the tenant wait that need `needed_bytes` more, as far as that is known."""
        more = f", what comes next needs {needed_bytes} more" if needed_bytes else ""
        return StoreFull(
            f"quota: the results of tenant {self.tenant} hold {self.held_bytes} of {self.limit_bytes} bytes{more}",
            remedy="delete what is not needed (POST /storage/deletions), or have the operator raise the limit "
            f"(`aerie tenants limit {self.tenant} --store-bytes N`); jobs go on by themselves",
            held_bytes=self.held_bytes, budget_bytes=self.limit_bytes, needed_bytes=needed_bytes,
        )  # fmt: skip


class Budgets:
    """The budgets of all tenants. `everybodys_bytes`: of those without a limit of their own; 0 is none."""

    def __init__(self, everybodys_bytes: int) -> None:
        self._everybodys_bytes = everybodys_bytes or None

    def all(self, session: Session) -> dict[str, Budget]:
        """Those of all limited tenants, by name."""
        found = StorageRepository(session).budgets(self._everybodys_bytes)
        return {tenant: Budget(tenant, held, limit) for tenant, held, limit in found}

    def of(self, session: Session, tenant: str) -> Budget | None:
        """That of `tenant`; None where nothing limits it."""
        found = StorageRepository(session).budgets(self._everybodys_bytes, tenant)
        return Budget(*found[0]) if found else None
