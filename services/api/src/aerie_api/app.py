"""The application: routes, errors, guards, life span."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool

from aerie_api import health, problems
from aerie_api.drafters import endpoints as drafter_endpoints
from aerie_api.guards import Guards
from aerie_api.house import House, Parts
from aerie_api.internal import endpoints as worker_endpoints
from aerie_api.jobs import endpoints as job_endpoints
from aerie_api.settings import Settings
from aerie_api.storage import endpoints as storage_endpoints
from aerie_api.tenants import endpoints as tenant_endpoints
from aerie_api.workers import endpoints as fleet_endpoints
from eagle3_core.jobs.spec import JobSpec

VERSION = "0.1.0"


def create_app(settings: Settings, parts: Parts | None = None, *, house: House | None = None) -> FastAPI:
    """The API, over `house` or over one that its life span opens. Either way the life span closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        inside = house or await run_in_threadpool(House, settings, parts or Parts())
        app.state.house = inside
        await run_in_threadpool(inside.open)
        try:
            yield
        finally:
            await run_in_threadpool(inside.close)

    app = FastAPI(
        title="Aerie",
        version=VERSION,
        summary="EAGLE-3 draft models as a service.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # behind a proxy that ends TLS it would send clients, key and all, to plain http
        separate_input_output_schemas=False,
    )
    app.include_router(job_endpoints.router)
    app.include_router(drafter_endpoints.router)
    app.include_router(fleet_endpoints.router)
    app.include_router(storage_endpoints.router)
    app.include_router(tenant_endpoints.router)
    app.include_router(health.router)
    app.include_router(worker_endpoints.router)
    for router in (
        job_endpoints.router, drafter_endpoints.router, fleet_endpoints.router, storage_endpoints.router,
        tenant_endpoints.router,
    ):  # fmt: skip
        app.include_router(router, prefix="/v1", include_in_schema=False)
    problems.install(app)
    app.add_middleware(Guards, settings=settings)
    app.openapi = lambda: document(app)
    return app


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: what FastAPI derives, with our problem documents in place of its error bodies."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas: dict[str, Any] = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    answer = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "A problem document (RFC 9457)", "content": answer}
    for name, entry in JobSpec.model_json_schema(ref_template="#/components/schemas/{model}").pop("$defs").items():
        schemas.setdefault(name, entry)
    schema["components"]["schemas"] = dict(sorted(schemas.items()))
    app.openapi_schema = schema
    return schema
