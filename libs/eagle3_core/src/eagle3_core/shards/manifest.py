"""What manifests say about shards, readable without torch: counts, codec, and the contract that all of them share."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from eagle3_core.errors import AerieError
from eagle3_core.objects.manifest import FileEntry, Manifest
from eagle3_core.verifier.contract import CaptureContract, agree


class ShardDamaged(AerieError):
    """A shard, or what its manifest says of it, contradicts itself."""

    code, status = "shards.damaged", 500


class ShardCounts(BaseModel):
    """What a shard holds; the `meta` of its entry in a manifest, and, summed up, the result of `extract`."""

    model_config = ConfigDict(extra="forbid")

    samples: NonNegativeInt
    tokens: NonNegativeInt
    supervised_tokens: NonNegativeInt
    """Tokens whose loss mask is 1."""
    final_states: NonNegativeInt
    """Positions at which the final state is kept."""


def shard_name(index: int) -> str:
    """Name of the `index`-th shard of a unit."""
    return f"shard-{index:05d}.safetensors"


def shard_entries(manifest: Manifest) -> list[tuple[FileEntry, ShardCounts]]:
    """The shards that `manifest` lists, in order. Raises ShardDamaged where an entry does not say what it holds."""
    found: list[tuple[FileEntry, ShardCounts]] = []
    for entry in manifest.files:
        if entry.name.startswith("shard-"):
            try:
                found.append((entry, ShardCounts.model_validate(entry.meta)))
            except ValidationError as error:
                raise ShardDamaged(
                    f"the manifest of unit {manifest.unit[0]} does not say what {entry.name} holds: {error}",
                    remedy="run extract again",
                ) from None
    return found


def contract_of(manifest: Manifest) -> CaptureContract:
    """How the states or the drafter of `manifest` came about. Raises ShardDamaged where it does not say so."""
    try:
        return CaptureContract.model_validate(manifest.contract)
    except ValidationError as error:
        raise ShardDamaged(
            f"the manifest of {manifest.stage} unit {manifest.unit[0]} carries no capture contract: {error}",
            remedy=f"run {manifest.stage} again",
        ) from None


def shared_contract(manifests: Sequence[Manifest]) -> CaptureContract:
    """The contract of all `manifests` (at least one). Raises ContractMismatch that names two units and the field."""
    return agree(contracts(manifests))


def contracts(manifests: Sequence[Manifest]) -> list[tuple[str, CaptureContract]]:
    """The contract of each of `manifests`, by the name of its unit. Raises ShardDamaged."""
    return [(f"{m.stage} unit {m.unit[0]}", contract_of(m)) for m in manifests]
