"""A conversation is rendered as serving renders it, in a sandbox, and the same on every day."""

import datetime
import json

import pytest

from eagle3_core.data.templates import FIXED_DAY, Chat, ChatTemplate, TemplateRefusal, load_tokenizer, prints_date
from eagle3_core.testing import CHATML, tiny_tokenizer, tiny_verifier
from eagle3_core.verifier.folder import VerifierTemplate, VerifierTokenizer
from eagle3_core.verifier.identity import inspect

TALK = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]


def render(source, messages=TALK, **names):
    return ChatTemplate(source, names).render(messages)


def test_turns_are_rendered_with_and_without_the_next_ones_opening():
    template = ChatTemplate(CHATML, {})

    assert template.render(TALK) == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    assert (
        template.render(TALK[:1], generation_prompt=True) == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_sees_the_special_tokens_by_name():
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>why?"


def test_json_in_a_template_is_not_escaped_for_html():
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_a_template_that_prints_the_date_prints_one_fixed_day():
    source = "{{ strftime_now('%d %b %Y') }}"

    assert prints_date(source)
    assert not prints_date(CHATML)
    assert datetime.datetime.strptime(render(source), "%d %b %Y").date() == FIXED_DAY.date()


def test_a_template_has_no_source_of_chance():
    with pytest.raises(VerifierTemplate, match="No filter named 'random'"):
        render("{{ messages | random }}")
    with pytest.raises(TemplateRefusal, match="lipsum"):
        render("{{ lipsum() }}")


def test_what_a_template_refuses_it_refuses_in_its_own_words():
    with pytest.raises(TemplateRefusal, match="no system here"):
        render("{{ raise_exception('no system here') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content + 3 }}",
        "{{ messages[9].content.upper() }}",
        "{{ 1 // 0 }}",
        "{{ 10.0 ** 400 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_reaches_out_or_breaks_is_refused(source):
    with pytest.raises(TemplateRefusal):
        render(source)


@pytest.mark.parametrize("source", ["{{ 'x' * 10**18 }}", "{{ messages[0].content * 10**18 }}"])
def test_a_template_that_needs_more_memory_than_there_is_met_a_limit_and_refused_nothing(source):
    with pytest.raises(MemoryError):  # which a confined process reports as what it is, however near the limit it was
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% if 1 %}" * 200 + "{% endif %}" * 200]
)
def test_a_template_nested_too_deeply_is_the_verifiers_fault(source):
    with pytest.raises(VerifierTemplate, match="does not compile"):
        ChatTemplate(source, {})


def test_a_template_that_does_not_compile_is_the_verifiers_fault():
    with pytest.raises(VerifierTemplate, match="line 2") as caught:
        ChatTemplate("a\n{% for %}", {})

    assert (caught.value.code, caught.value.pointer) == ("verifier.chat_template", "/verifier/model")


def test_generation_blocks_are_found_in_the_text_and_leave_it_alone():
    source = "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
    template = ChatTemplate(source, {})

    text = template.render(TALK)

    assert template.marks_answers
    assert text == "[user]why?![assistant]so!"
    assert [text[a:b] for a, b in template.answer_spans(TALK, text)] == ["why?!", "so!"]


def test_marks_are_taken_from_what_the_text_does_not_use():
    template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}", {})
    odd = [{"role": "user", "content": "\ue000a\ue001"}]

    assert template.answer_spans(odd, template.render(odd)) == [(0, 3)]


def test_a_template_that_trims_its_generation_blocks_is_refused():
    source = "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
    template = ChatTemplate(source, {})

    with pytest.raises(TemplateRefusal, match="generation blocks"):
        template.answer_spans(TALK, template.render(TALK))


def test_control_tokens_in_a_question_are_seen(tmp_path):
    chat = Chat.of(inspect(tiny_verifier(tmp_path / "v")))

    assert chat.control_text(TALK) is None
    assert chat.control_text([*TALK, {"role": "user", "content": "say <|im_end|> now"}]) == "<|im_end|>"


def test_a_tokenizer_that_pads_or_cuts_by_itself_is_made_to_stop(tmp_path):
    tokenizer = tiny_tokenizer(320)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)

    chat = Chat(ChatTemplate(CHATML, {}), tokenizer, [2])

    assert len(chat.encode("abc")) == 3
    assert len(chat.encode("abcdef")) == 6


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"model": {"type": "BPE"}})])
def test_a_damaged_tokenizer_is_the_verifiers_fault(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)

    with pytest.raises(VerifierTokenizer, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)

    assert caught.value.pointer == "/verifier/model"


LLAMA3 = (
    "{{- bos_token }}\n{%- if not date is defined %}\n    {%- set date = '26 Jul 2024' %}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
LOOPS = (
    "{% for message in messages %}\n{% if message.role == 'system' %}{% continue %}{% endif %}\n"
    "  {{ message | tojson(indent=2) }}\n{% endfor %}{{ tools is none }}{{ documents is none }}{{ pad_token }}\n"
)
GENERATION = (
    "{% for m in messages %}{{ m.role }}:\n{% generation %}{{ m.content }}</s>\n{% endgeneration %}\n{% endfor %}"
)


@pytest.mark.slow
def test_text_and_tokens_are_those_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    talks = [TALK, [{"role": "system", "content": " <é> "}, *TALK, {"role": "user", "content": "\n字 12  3\n"}]]
    for index, source in enumerate((CHATML, LLAMA3, LOOPS, GENERATION)):
        folder = tiny_verifier(tmp_path / str(index), chat_template=source)
        chat, theirs = Chat.of(inspect(folder)), AutoTokenizer.from_pretrained(folder)
        for talk in talks:
            for opened in (False, True):
                text = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=opened)
                tokens = theirs.apply_chat_template(talk, add_generation_prompt=opened, return_dict=False)
                assert chat.template.render(talk, generation_prompt=opened) == text
                assert chat.encode(text) == tokens
