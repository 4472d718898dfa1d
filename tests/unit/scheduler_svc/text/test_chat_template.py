import json
from pathlib import Path

import pytest

from common.errors import InvalidParameter, StartupError
from common.model_spec import read_model_spec
from scheduler_svc.text.chat_template import ChatTemplate
from tests.unit.scheduler_svc.text.small_tokenizers import write_model_folder

TURNS = [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": "Grüße\n  日本 "}]

# Features that real templates use: loop controls, trimming, filters, namespaces, special tokens, tojson, generation blocks.
TEMPLATE = """{{ bos_token }}
{%- set ns = namespace(found=false) -%}
{% for message in messages %}
    {%- if message['role'] == 'system' and not ns.found %}
        {%- set ns.found = true %}
[SYS]{{ message['content'] | trim }}[/SYS]
        {%- continue %}
    {%- endif %}
    {% generation %}[{{ message.role | upper }}] {{ message | tojson }} {{ message['content'] | tojson(indent=2) }}{{ eos_token }}
    {% endgeneration %}
{% endfor %}
{% if add_generation_prompt and not tools %}[GO]{% endif %}"""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_gives_what_transformers_gives(tmp_path: Path, add_generation_prompt: bool) -> None:
    from transformers import AutoTokenizer

    folder = write_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(read_model_spec(folder))
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert template.render(TURNS, add_generation_prompt=add_generation_prompt) == theirs


def test_a_template_may_refuse_a_conversation() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidParameter, match=r"chat\.messages: .*roles must alternate"):
        template.render(TURNS, add_generation_prompt=True)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__base__.__subclasses__() }}", {})
    with pytest.raises(InvalidParameter):
        template.render(TURNS, add_generation_prompt=True)


def test_a_broken_template_is_said_at_start() -> None:
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert ChatTemplate.load(read_model_spec(folder)) is None
