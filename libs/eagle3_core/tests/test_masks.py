"""What is supervised is what the assistant wrote and its end of turn: no more, no less, whatever the template does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from eagle3_core.data.masks import supervise
from eagle3_core.data.templates import Chat, ChatTemplate, TemplateRefusal
from eagle3_core.testing import CHATML, tiny_tokenizer

END = "<|im_end|>"
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.content.split('</think>')[0].split('<think>')[-1]"
    ".strip('\n') if '</think>' in m.content else '') + '\n</think>\n\n' + answer }}"
    "{% else %}{{ answer }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Thinking is shown in the last turn (empty if there is none) and stripped from earlier ones."""
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
"""No opening of the assistant's turn, spaces around the answer."""
UNOPENED = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
"""Ignores add_generation_prompt."""
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HALF_TAGGED = TAGGED.replace(
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat(template: str = CHATML, eos: tuple[int, ...] = (2,), tokenizer: Tokenizer | None = None) -> Chat:
    return Chat(ChatTemplate(template, {}), tokenizer or tiny_tokenizer(320), eos)


def talk(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    rows = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system else []) + rows


def spans(chat: Chat, messages) -> list[str]:
    """The supervised stretches of a conversation, decoded."""
    masked = supervise(chat, messages)
    assert len(masked.input_ids) == len(masked.loss_mask)
    found: list[list[int]] = []
    for before, token, flag in zip([0, *masked.loss_mask], masked.input_ids, masked.loss_mask, strict=False):
        if flag and not before:
            found.append([])
        if flag:
            found[-1].append(token)
    return [chat.tokenizer.decode(ids, skip_special_tokens=False) for ids in found]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\uf8fe"), min_size=1).filter(str.strip)


@given(
    st.lists(texts, min_size=2, max_size=7), st.one_of(st.none(), texts), st.sampled_from([CHATML, TAGGED, UNOPENED])
)
def test_the_supervised_stretches_are_the_answers_with_their_ends(turns, system, template):
    mine = chat(template)
    messages = talk(*turns, system=system)

    assert spans(mine, messages) == [text + END for text in turns[1::2]]


@given(st.lists(texts, min_size=2, max_size=5))
def test_the_tokens_are_those_of_the_rendered_text(turns):
    mine = chat()
    messages = talk(*turns)[: len(turns) // 2 * 2]

    ids = supervise(mine, messages).input_ids

    assert mine.tokenizer.decode(ids, skip_special_tokens=False) == mine.template.render(messages)


def test_each_answers_prompt_is_what_serving_would_have_sent():
    mine = chat()
    messages = talk("a", "b", "c", "d")

    masked = supervise(mine, messages)

    starts = [i for i, flag in enumerate(masked.loss_mask) if flag and not masked.loss_mask[i - 1]]
    assert [masked.input_ids[:start] for start in starts] == [mine.prompt(messages[:1]), mine.prompt(messages[:3])]


@pytest.mark.parametrize("content", ["assistant", "im_end", "user", "s", "\n", "<|im_start", "a\nassistant\n"])
def test_an_answer_that_looks_like_the_frame_is_found_in_its_place(content):
    for template in (CHATML, UNOPENED, TAGGED):
        assert spans(chat(template), talk("q", f"{content}x")) == [f"{content}x{END}"]


def test_an_answer_that_begins_at_the_first_token_is_supervised_from_there():
    template = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"

    assert spans(chat(template), [{"role": "assistant", "content": " hi"}]) == [" hi" + END]


def test_a_question_without_answer_at_the_end_is_left_out():
    assert spans(chat(), talk("a", "b", "c")) == ["b" + END]


def test_nothing_is_supervised_where_nobody_answered():
    assert spans(chat(), talk("a")) == []


def test_an_empty_thinking_block_that_the_template_adds_is_not_supervised():
    assert spans(chat(QWEN), talk("a", "b")) == ["b" + END]


def test_thinking_that_the_answer_brings_is_supervised():
    assert spans(chat(QWEN), talk("a", "<think>\nhm\n</think>\n\nb")) == ["<think>\nhm\n</think>\n\nb" + END]


def test_where_history_is_rewritten_only_the_last_answer_is_trained_and_the_others_counted():
    messages = talk("a", "<think>\nx\n</think>\n\nb", "c", "<think>\ny\n</think>\n\nd")

    masked = supervise(chat(QWEN), messages)

    assert spans(chat(QWEN), messages) == ["<think>\ny\n</think>\n\nd" + END]
    assert masked.rewritten == 1


def test_where_no_context_is_what_serving_sends_nothing_is_trained():
    template = CHATML + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"

    masked = supervise(chat(template), talk("a", "b", "c", "d"))

    assert (sum(masked.loss_mask), masked.rewritten) == (0, 2)


def test_spaces_that_the_template_sets_around_an_answer_belong_to_it():
    assert spans(chat(LLAMA2), talk("a", "b", "c", "d")) == [" b " + END, " d " + END]


def test_a_template_that_leaves_the_end_out_of_its_answers_is_taken_at_its_word():
    assert spans(chat(HALF_TAGGED), talk("a", "b")) == ["b"]


def test_an_end_of_turn_that_differs_from_the_end_of_text_is_supervised_and_counted():
    masked = supervise(chat(eos=(0,)), talk("a", "b"))

    assert spans(chat(eos=(0,)), talk("a", "b")) == ["b" + END]
    assert masked.unended == 1


def test_without_any_end_of_turn_the_answer_ends_with_its_text():
    masked = supervise(chat(ENDLESS), talk("a", "b"))

    assert spans(chat(ENDLESS), talk("a", "b")) == ["b"]
    assert masked.unended == 1


def test_a_token_that_would_span_prompt_and_answer_is_cut_where_serving_cuts_it():
    ids = {"<|im_start|>": 0, "x": 1, "<|im_end|>": 2, "Ċ": 3, "ĊĊ": 4, "Ġ": 5}
    ids |= {letter: 6 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwyz")}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    mine = chat(tokenizer=tokenizer)
    messages = talk("a", "\nb")

    masked = supervise(mine, messages)

    assert spans(mine, messages) == ["\nb" + END]
    assert masked.input_ids[: masked.loss_mask.index(1)] == mine.prompt(messages[:1])


def slow(chat: Chat) -> Chat:
    """The same chat, every prefix of a text encoded anew."""
    chat.splits_at_control = False
    return chat


def metaspace() -> Tokenizer:
    """A tokenizer that sets a space in front of whatever text it begins with, as Llama 2's does."""
    tokenizer = tiny_tokenizer(320)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def greedy_space() -> Tokenizer:
    """A tokenizer whose control token takes the space behind it."""
    tokenizer = tiny_tokenizer(320)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False, rstrip=True)])
    return tokenizer


@given(
    st.lists(texts, min_size=2, max_size=9),
    st.sampled_from([CHATML, QWEN, LLAMA2, TAGGED, ENDLESS]),
    st.sampled_from([lambda: tiny_tokenizer(320), metaspace, greedy_space]),
)
def test_what_is_encoded_piece_by_piece_is_what_every_prefix_encodes_to(turns, template, tokenizer):
    messages, quick = talk(*turns), chat(template, tokenizer=tokenizer())

    assert outcome(quick, messages) == outcome(slow(chat(template, tokenizer=tokenizer())), messages)


def outcome(chat: Chat, messages) -> object:
    try:
        return supervise(chat, messages)
    except TemplateRefusal as refusal:
        return str(refusal)


@given(st.lists(texts, min_size=2, max_size=9), st.integers(1, 60), st.sampled_from([CHATML, TAGGED, ENDLESS]))
def test_a_limit_changes_nothing_before_it(turns, limit, template):
    messages = talk(*turns)
    whole, cut = supervise(chat(template), messages), supervise(chat(template), messages, limit)

    assert (cut.input_ids[:limit], cut.loss_mask[:limit]) == (whole.input_ids[:limit], whole.loss_mask[:limit])
    assert (len(cut.input_ids) > limit) == (len(whole.input_ids) > limit)


def test_turns_behind_the_limit_cost_nothing():
    mine, seen = chat(), []
    render = mine.template.render
    mine.template.render = lambda messages, **how: seen.append(len(messages)) or render(messages, **how)

    supervise(mine, talk(*["word " * 5] * 600), limit=100)

    assert len(seen) < 30
