"""States of a prompt are whole or an error, in whatever order and however often the engine computes it."""

import pytest
import torch

from aerie_verifier.gathering import CaptureIncomplete, Chunk, PromptStates


def joined(parts: list[Chunk]) -> Chunk:
    """Consecutive chunks as one."""
    return Chunk(torch.cat([part.aux_n3H for part in parts]), torch.cat([part.final_nH for part in parts]))


def chunk(first: int, tokens: int) -> Chunk:
    """States whose values are their positions."""
    place = torch.arange(first, first + tokens, dtype=torch.float32)[:, None]
    return Chunk(place.expand(-1, 6).clone(), place.expand(-1, 2).clone())


def gathered(*parts: tuple[int, int]) -> PromptStates:
    states = PromptStates()
    for first, tokens in parts:
        states.add(first, chunk(first, tokens))
    return states


def test_chunks_of_a_prompt_come_together_in_order() -> None:
    states = gathered((0, 64), (64, 64), (128, 7))

    whole = joined(states.whole(135))

    assert whole.aux_n3H[:, 0].tolist() == list(range(135))
    assert whole.final_nH.shape == (135, 2)


def test_tokens_that_a_prefix_cache_held_are_an_error_that_names_them() -> None:
    states = gathered((39, 1))

    with pytest.raises(CaptureIncomplete, match="positions 0 to 38 are missing, of a prompt of 40"):
        states.whole(40)


def test_a_chunk_that_the_engine_dropped_is_an_error_that_names_it() -> None:
    states = gathered((0, 64), (128, 33))

    with pytest.raises(CaptureIncomplete, match="positions 64 to 127"):
        states.whole(161)


def test_an_end_that_is_missing_is_an_error() -> None:
    with pytest.raises(CaptureIncomplete, match="positions 64 to 99"):
        gathered((0, 64)).whole(100)


def test_more_states_than_tokens_are_an_error() -> None:
    with pytest.raises(CaptureIncomplete, match="65 tokens came for a prompt of 64"):
        gathered((0, 65)).whole(64)


def test_a_request_that_was_taken_back_and_finds_its_first_chunks_cached_is_whole_all_the_same() -> None:
    states = gathered((0, 64), (64, 64))
    states.add(100, chunk(100, 50))  # computed again from where the cache ended

    whole = joined(states.whole(150))

    assert whole.aux_n3H[:, 0].tolist() == list(range(150))
