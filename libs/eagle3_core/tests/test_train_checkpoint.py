"""Checkpoints count only when whole, of the same training, and newest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_core.objects.keys import CheckpointFile, checkpoint_file
from eagle3_core.objects.local import LocalStore
from eagle3_core.train.checkpoint import Checkpoints


class Kept:
    """A store, and checkpoints in it by unit and fence."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder, self.warnings = LocalStore(folder / "store"), folder, list[str]()
        (folder / "scratch").mkdir()

    def of(self, provenance: str = "a" * 64, fence: int = 1, keep: int = 2) -> Checkpoints:
        return Checkpoints(
            self.store, tenant="t", provenance=provenance, fence=fence, keep=keep, scratch=self.folder / "scratch",
            warn=self.warnings.append,
        )  # fmt: skip

    def keys(self, ending: str) -> list[str]:
        return [stat.key for stat in self.store.list("t/checkpoints/") if stat.key.endswith(ending)]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, {"w": torch.full((3,), float(step))}, {"step": step, "loss": 0.1 + step})


def newest(checkpoints: Checkpoints) -> int | None:
    restored = checkpoints.latest()
    if restored is None:
        return None
    assert restored.tensors["w"].tolist() == [float(restored.marker.step)] * 3
    return restored.marker.step


def test_the_newest_comes_back_with_its_cursor(kept: Kept) -> None:
    save(kept.of(), 5)
    save(kept.of(), 12)

    restored = kept.of(fence=2).latest()

    assert restored is not None
    assert restored.marker.cursor == {"step": 12, "loss": 12.1}
    assert restored.tensors["w"].tolist() == [12.0] * 3
    assert kept.warnings == []


def test_whoever_lists_the_store_can_tell_its_files_apart(kept: Kept) -> None:
    save(kept.of(fence=7), 12)

    assert [checkpoint_file(key) for key in kept.keys("complete.json")] == [CheckpointFile(12, 7, marker=True)]
    assert [checkpoint_file(key) for key in kept.keys("state.safetensors")] == [CheckpointFile(12, 7, marker=False)]
    assert checkpoint_file("t/checkpoints/k/00000012-000007-other.json") is None


def test_only_the_newest_are_kept_and_nothing_of_the_others_remains(kept: Kept) -> None:
    for step in (1, 2, 3, 100):
        save(kept.of(), step)

    assert len(kept.keys("complete.json")) == 2
    assert len(kept.keys("state.safetensors")) == 2
    assert newest(kept.of()) == 100


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "marker"])
def test_a_damaged_checkpoint_is_passed_over_loudly_for_the_older_one(kept: Kept, damage: str) -> None:
    save(kept.of(), 5)
    save(kept.of(), 6)
    victim = kept.store.root / kept.keys("complete.json" if damage == "marker" else "state.safetensors")[-1]
    data = victim.read_bytes()

    if damage == "deleted":
        victim.unlink()
    else:
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flipped" else data[: len(data) // 2])

    assert newest(kept.of()) == 5
    assert len(kept.warnings) == 1
    assert "00000006" in kept.warnings[0]


def test_a_file_without_its_marker_does_not_count(kept: Kept) -> None:
    save(kept.of(), 5)
    save(kept.of(), 6)
    kept.store.delete(kept.keys("complete.json")[-1])

    assert newest(kept.of()) == 5


def test_another_trainings_checkpoints_are_not_seen(kept: Kept) -> None:
    save(kept.of("b" * 64), 9)

    assert newest(kept.of("a" * 64)) is None


def test_a_marker_copied_from_another_training_is_refused(kept: Kept) -> None:
    save(kept.of("b" * 64), 9)
    (marker,) = kept.keys("complete.json")
    kept.store.put_bytes(marker.replace("b" * 64, "a" * 64), kept.store.get_bytes(marker))

    assert newest(kept.of("a" * 64)) is None
    assert "belongs to unit bbbb" in kept.warnings[0]


def test_a_zombies_checkpoint_of_the_same_step_is_as_good(kept: Kept) -> None:
    save(kept.of(fence=1), 5)
    save(kept.of(fence=2), 5)

    assert newest(kept.of(fence=3)) == 5
    assert len(kept.keys("complete.json")) == 2


def test_discarding_leaves_nothing(kept: Kept) -> None:
    save(kept.of(), 5)

    kept.of().discard()

    assert list(kept.store.list("t/")) == []
