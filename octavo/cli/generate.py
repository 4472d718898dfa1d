"""`octavo generate`: one prompt, one answer."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from octavo.answers import Completion, Finished, FinishReason, TextDelta
from octavo.cli import sampling
from octavo.cli.connection import Target, Timeout, TlsCa, Token, connect
from octavo.cli.console import out, say, write
from octavo.cli.figures import answer_figures
from octavo.client import DEFAULT_TARGET, OctavoClient
from octavo.errors import InvalidParameter, SequenceFailed
from octavo.prompt import ChatMessage, GenerateOptions, Prompt


def generate(
    prompt: Annotated[str, typer.Argument(help="Text; - reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
    model: sampling.Model = "",
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    n: Annotated[int, typer.Option("-n", help="Parallel samples.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end of text.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log probabilities of this many tokens.")] = None,
    cache_salt: Annotated[str, typer.Option(help="Share no cached prefix with other salts.")] = "",
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
    timeout: Timeout = 300.0,
) -> None:
    """Complete a prompt."""
    options = sampling.chosen(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos or None,
        logprobs=logprobs,
        cache_salt=cache_salt,
        n=n,
        return_token_ids=as_json or None,
    )
    text = _read_stdin() if prompt == "-" else prompt
    asked: Prompt = [ChatMessage("user", text)] if chat else text
    with connect(target, token, tls_ca, timeout) as client:
        if as_json:
            out.print(json.dumps(dataclasses.asdict(client.generate(asked, **options)), ensure_ascii=False), markup=False)
        elif n > 1:
            _show(client.generate(asked, **options))
        else:
            _stream(client, asked, options)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt", f"standard input is not UTF-8: {error.reason} at byte {error.start}") from error


def _show(completion: Completion) -> None:
    for index, sample in enumerate(completion.samples):
        say(f"sample {index} ({sample.finish.reason})")
        write(f"{sample.text}\n")
    say(answer_figures(completion.usage, completion.timing))


def _stream(client: OctavoClient, prompt: Prompt, options: GenerateOptions) -> None:
    for event in client.stream(prompt, **options):
        match event:
            case TextDelta(text=text):
                write(text)
            case Finished(finishes=finishes, usage=usage, timing=timing):
                write("\n")
                if finishes[0].reason is FinishReason.ERROR:
                    raise SequenceFailed(finishes[0].error_message)
                say(answer_figures(usage, timing))
