"""`octavo demo`: a server for one question, asked twice. What a newcomer sees first."""

from typing import Annotated

import typer

from octavo.answers import Finished, TextDelta
from octavo.cli.console import out, say, write
from octavo.cli.figures import answer_figures
from octavo.cli.server import run_until_stopped, running_server
from octavo.cli.services import DEFAULT_MODEL, StackOptions
from octavo.client import AsyncOctavoClient
from octavo.prompt import ChatMessage

_QUESTION = "What is a book, and why do people read books? Answer in three sentences."


def demo(
    model: Annotated[str, typer.Option(help="Name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option(help="The question.")] = _QUESTION,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at most.")] = 96,
) -> None:
    """Start a server, ask it one question twice, stop it."""
    if not run_until_stopped(_demo(model, prompt, max_tokens)):
        say("stopped")
        raise typer.Exit(130)


async def _demo(model: str, prompt: str, max_tokens: int) -> None:
    def on_line(name: str, line: str) -> None:
        if name == "prepare":
            say(f"  {line}")

    async with running_server(StackOptions(model=model), on_line, say) as (_, target):
        async with AsyncOctavoClient(target, timeout_s=300.0) as client:
            for number, note in enumerate(("the first time", "the same again: the prompt's blocks are still on the device")):
                out.print(f"\n[bold]> {prompt}[/bold]" if number == 0 else "", end="\n" if number == 0 else "")
                say(f"({note})")
                async for event in client.stream([ChatMessage("user", prompt)], temperature=0.0, max_tokens=max_tokens):
                    match event:
                        case TextDelta(text=text):
                            write(text)
                        case Finished(usage=usage, timing=timing):
                            write("\n")
                            say(answer_figures(usage, timing), style="green")
        say("\nstopping")
