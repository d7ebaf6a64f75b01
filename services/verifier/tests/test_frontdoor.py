"""Capture is off unless asked for, a slip of the pen in its configuration is refused, and so is what cannot be captured whole."""

import pytest

from aerie_verifier.config import CaptureMisconfigured, read_config
from aerie_verifier.frontdoor import CaptureRefused, check
from eagle3_core.engine.config import CAPTURE_VARIABLE


def test_capture_is_off_unless_it_is_asked_for() -> None:
    assert read_config({}) is None


def test_a_capture_configuration_with_a_slip_of_the_pen_is_refused() -> None:
    with pytest.raises(CaptureMisconfigured, match="sinkk"):
        read_config({CAPTURE_VARIABLE: '{"sinkk": "file:///s", "aux_layers": [2, 4, 5]}'})


class Request:
    """What the engine makes of a request's body."""

    def __init__(self, **fields: object) -> None:
        self.rid, self.input_ids, self.text, self.stream = None, [5, 6], None, False
        self.return_hidden_states, self.sampling_params = True, {"max_new_tokens": 1}
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"return_hidden_states": "last"}, "return_hidden_states is 'last'"),
        ({"input_ids": [[5], [6]]}, "several prompts"),
        ({"sampling_params": {"max_new_tokens": 2}}, "max_new_tokens 1"),
        ({"sampling_params": None}, "max_new_tokens 1"),
        ({"sampling_params": {"max_new_tokens": 1, "n": 2}}, "one answer"),
        ({"stream": True}, "not streamed"),
        ({"rid": "../../etc"}, "part of a key"),
        ({"lora_path": "an-adapter"}, "lora_path would change the states"),
        ({"input_embeds": [[0.5]], "image_data": ["x.png"]}, "input_embeds, image_data would change"),
    ],
)
def test_a_request_that_cannot_be_captured_whole_is_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(CaptureRefused, match=reason):
        check(Request(**fields))


def test_one_prompt_with_one_token_of_answer_is_admitted() -> None:
    check(Request(rid="sample-17"))
