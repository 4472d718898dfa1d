"""`octavo chat`: a conversation in the terminal. The client keeps the turns; the server's prefix cache makes that cheap."""

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Annotated

import typer

from octavo.answers import Event, Finished, TextDelta
from octavo.cli import sampling
from octavo.cli.connection import Target, Timeout, TlsCa, Token, connect
from octavo.cli.console import say, say_error, write
from octavo.cli.figures import answer_figures
from octavo.client import DEFAULT_TARGET
from octavo.errors import OctavoError, Unavailable
from octavo.prompt import ChatMessage

with contextlib.suppress(ImportError):  # some builds of Python have none
    import readline  # noqa: F401 -- gives input() a history and line editing


def chat(
    model: sampling.Model = "",
    system: Annotated[str, typer.Option(help="What the assistant is told first.")] = "",
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    seed: sampling.Seed = None,
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
    timeout: Timeout = 300.0,
) -> None:
    """Talk to a model. /exit ends, /clear forgets, Ctrl-C stops an answer."""
    options = sampling.chosen(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    first = [ChatMessage("system", system)] if system else []
    messages = list(first)
    with connect(target, token, tls_ca, timeout) as client:
        served = [found.name for found in client.models()]
        say(f"{model or ', '.join(served)} on {target} · /exit ends, /clear forgets, Ctrl-C stops an answer")
        for line in _lines():
            if line == "/exit":
                return
            if line == "/clear":
                messages = list(first)
                continue
            messages.append(ChatMessage("user", line))
            try:
                answer = _answer(client.stream(messages, **options))
            except Unavailable:
                raise
            except OctavoError as error:  # of this turn; the conversation goes on without it
                say_error(error.message)
                messages.pop()
            else:
                messages.append(ChatMessage("assistant", answer))


def _lines() -> Iterator[str]:
    """What the user types, empty lines left out; ends at the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            write("\n")
            say("/exit ends")
            continue
        if line:
            yield line


def _answer(events: Generator[Event, None, None]) -> str:
    """Writes an answer as it comes; Ctrl-C ends it early.

    Returns:
        Its text so far.
    """
    text: list[str] = []
    try:
        for event in events:
            match event:
                case TextDelta(text=piece):
                    text.append(piece)
                    write(piece)
                case Finished(usage=usage, timing=timing):
                    write("\n")
                    say(answer_figures(usage, timing))
    except KeyboardInterrupt:
        events.close()
        write("\n")
        say("stopped")
    return "".join(text)
