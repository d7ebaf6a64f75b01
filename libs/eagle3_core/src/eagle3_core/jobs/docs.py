"""The reference page of a job, made from the job model itself, so that the two cannot disagree.

`python -m eagle3_core.jobs.docs` writes it to standard output; `docs/job.md` is that text, and a test compares them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from eagle3_core.jobs.spec import JobSpec

HEAD = """# A job, field by field

This page is made from the job model (`python -m eagle3_core.jobs.docs`). A job is one JSON (or YAML) document; a field that
is not listed here is refused. `POST /jobs:plan` or `aerie plan FILE` says what a job would do before it runs.

What this version cannot do has no field:

- verifier: engines other than transformers and SGLang, several machines, data or expert parallelism, free arguments of the
  engine, quantized models, models that need code of their own;
- data and states: datasets of token ids, data or states in buckets or hubs (and so credentials for them), states that somebody
  else captured, codecs other than raw, training on states that are never stored;
- training: several machines, optimizers other than AdamW and Muon, going on from another drafter, trackers;
- evaluation: during training, or against the drafter that is now in service;
- resources: kinds and replicas of GPUs, queues of a job's own, retention of one job's states.
"""


def _type(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"[{schema['$ref'].rsplit('/', 1)[-1]}](#{schema['$ref'].rsplit('/', 1)[-1].lower()})"
    if "enum" in schema:
        return " \\| ".join(f"`{v}`" for v in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(_type(s, defs) for s in schema["anyOf"])
    if schema.get("type") == "array":
        inner = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {_type(inner, defs)}"
    bounds = [
        f"{sign} {schema[name]}"
        for name, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if name in schema
    ]
    return " ".join([str(schema.get("type", "any")), *([f"({', '.join(bounds)})"] if bounds else [])])


def _table(schema: dict[str, Any], defs: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", []))
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        section = "$ref" in field
        default = (
            "required" if name in required else "see there" if section else f"`{json.dumps(field.get('default'))}`"
        )
        if name not in required and "default" not in field and not section:
            default = "`{}`"
        meaning = " ".join(str(field.get("description", "")).split())
        if section and not meaning:
            meaning = str(defs[field["$ref"].rsplit("/", 1)[-1]].get("description", "")).splitlines()[0]
        rows.append(f"| `{name}` | {_type(field, defs)} | {default} | {meaning} |")
    return rows


def render() -> str:
    """The page as Markdown."""
    schema = JobSpec.model_json_schema()
    defs: dict[str, Any] = schema.get("$defs", {})
    lines = [HEAD, "## Job", "", schema["description"], "", *_table(schema, defs)]
    for name, section in defs.items():
        lines += ["", f"## {name}", "", str(section.get("description", "")), "", *_table(section, defs)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
