"""Commands that talk to a server, and how failures look."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo import __version__
from octavo.cli.main import app
from tests.unit.octavo.conftest import Served
from tests.unit.octavo.fake_scheduler import MODEL

CLI = (sys.executable, "-c", "from octavo.cli.main import main; main()")


def octavo(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_version() -> None:
    assert octavo("--version").stdout == f"octavo {__version__}\n"


@pytest.mark.parametrize("command", ["up", "demo", "chat", "generate", "models", "top", "doctor", "executors"])
def test_every_command_explains_itself(command: str) -> None:
    result = octavo(command, "--help")

    assert result.exit_code == 0
    assert f"octavo {command}" in result.stdout


@pytest.mark.parametrize("arguments", [["models"], ["generate", "x"], ["chat"], ["top", "--once"]])
def test_no_server_is_one_line_with_what_to_do(arguments: list[str], tmp_path: Path) -> None:
    result = octavo(*arguments, "--target", f"unix:{tmp_path}/nobody.sock")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: no server answers at unix:{tmp_path}/nobody.sock")
    assert result.stderr.endswith("start one with: octavo up)\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models", "--target", "nonsense"], "host:port"),
        (["up", "--kv-memory", "much"], "--kv-memory"),
        (["up", "--executor-args", "--kv-dtype 'fp8"], "--executor-args: No closing quotation"),
        (["demo", "--executor-args", "--kv-memory-bytes 5"], "--kv-memory-bytes is set by octavo itself"),
        (["up", "--listen", "nonsense"], "host:port"),
        (["up", "--listen", "0.0.0.0:0"], "reachable from other hosts"),
        (["generate", "--top-k", "-1", "hello"], "top_k"),
    ],
)
def test_bad_options_are_one_line_that_names_them(arguments: list[str], words: str) -> None:
    result = octavo(*arguments)

    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_generate_writes_the_answer_and_nothing_else_to_standard_output(served: Served) -> None:
    result = octavo("generate", "one two three", "--target", served.target)

    assert result.exit_code == 0
    assert result.stdout == "three two one\n"
    assert "3 tokens · 2.0 tokens/s · first token after 0.50 s · prompt of 3 tokens: 1 device, 2 computed" in result.stderr


def test_generate_reads_a_prompt_from_standard_input(served: Served) -> None:
    assert octavo("generate", "-", "--target", served.target, stdin="von größe\n").stdout == "größe von\n"


def test_generate_refuses_input_that_is_no_utf8(served: Served) -> None:
    result = octavo("generate", "-", "--target", served.target, stdin=b"abc \xff\xfe")

    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr
    assert served.fake.requests == []


def test_generate_as_json_is_the_whole_answer(served: Served) -> None:
    answer = json.loads(octavo("generate", "a [b]", "--json", "-n", "2", "--target", served.target).stdout)

    assert [sample["text"] for sample in answer["samples"]] == ["[b] a"] * 2
    assert answer["samples"][0]["finish"]["reason"] == "length"
    assert answer["samples"][0]["token_ids"] == [0, 1]
    assert answer["usage"]["cached_tokens_by_tier"] == {"device": 1}


def test_generate_passes_its_options_on(served: Served) -> None:
    sampling = ("--temperature", "0", "--top-k", "0", "--seed", "0")
    stopping = ("--max-tokens", "5", "--stop", "END", "--stop", "STOP", "--ignore-eos")
    octavo("generate", "hello", *sampling, *stopping, "--chat", "--cache-salt", "s", "--target", served.target)

    request = served.fake.requests[0]
    assert request.chat.messages[0].content == "hello"
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert (request.stopping.max_tokens, list(request.stopping.stop), request.stopping.ignore_eos) == (5, ["END", "STOP"], True)
    assert request.cache_salt == "s"


def test_several_samples_are_told_apart(served: Served) -> None:
    result = octavo("generate", "a b", "-n", "2", "--target", served.target)

    assert result.stdout == "b a\nb a\n"
    assert "sample 1" in result.stderr


def test_an_error_of_the_server_is_one_line(served: Served) -> None:
    result = octavo("generate", "PromptTooLong", "--target", served.target)

    assert (result.exit_code, result.stderr) == (2, "error: prompt: is bad\n")


def test_models_are_listed(served: Served) -> None:
    result = octavo("models", "--target", served.target)

    assert f"{MODEL}" in result.stdout
    assert "8,192" in result.stdout
    assert "no executor" in result.stdout
    assert [model["name"] for model in json.loads(octavo("models", "--json", "--target", served.target).stdout)] == [
        MODEL,
        "models/second",
    ]


def test_top_shows_rates_blocks_tiers_and_degraded_paths_once(served: Served) -> None:
    result = octavo("top", "--once", "--target", served.target)

    assert result.exit_code == 0
    for text in ("4 running", "2 waiting", "40.0/s output", "(25%)", "kvstore_unavailable 6", "1.0 MiB", "12.5", "25%"):
        assert text in result.stdout
    assert "kept in fp8_e4m3" in result.stdout
    assert "tiers off  disk: /kv: no space left" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("executor-0"))
    assert row.split()[1:7] == ["5", "100", "40", "10", "25", "35"]
    rows = [line for line in result.stdout.splitlines() if line.startswith(("shm", "disk"))]
    assert "50%" in rows[0]
    assert rows[1].split()[-5:] == ["700", "6", "2", "75%", "0"]
    assert rows[3].split() == ["disk", "2.0", "GiB/s", "4.0", "1.5", "GiB/s", "2", "5"]


def test_chat_remembers_forgets_and_ends(served: Served) -> None:
    lines = "hello there\n\nand you\n/clear\nagain\n/exit\nnever\n"
    result = octavo("chat", "--system", "be kind", "--target", served.target, stdin=lines)

    assert result.exit_code == 0
    turns = [[(turn.role, turn.content) for turn in request.chat.messages] for request in served.fake.requests]
    first = [("system", "be kind"), ("user", "hello there")]
    assert turns[0] == first
    assert turns[1] == [*first, ("assistant", "there hello kind be"), ("user", "and you")]
    assert turns[2] == [("system", "be kind"), ("user", "again")]
    assert len(turns) == 3


def test_a_turn_that_fails_leaves_the_conversation(served: Served) -> None:
    result = octavo("chat", "--target", served.target, stdin="hello\nQueueFull\nagain\n")

    assert result.exit_code == 0
    assert "error: as asked for" in result.stderr
    assert [turn.content for turn in served.fake.requests[-1].chat.messages] == ["hello", "hello", "again"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(served: Served) -> None:
    process = subprocess.Popen(
        [*CLI, "chat", "--target", served.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"go on forever\n")
        process.stdin.flush()
        assert process.stdout.read(20).startswith(b"forever on go")

        process.send_signal(signal.SIGINT)
        assert served.fake.left.wait(20)
        process.stdin.write(b"hello\n/exit\n")
        process.stdin.flush()
        output = process.stdout.read()

        assert process.wait(20) == 0
    last = served.fake.requests[-1].chat.messages
    assert last[1].role == "assistant"
    assert last[1].content.startswith("forever on go and on")
    assert output.endswith(b"go\n")


def test_ctrl_c_ends_other_commands_without_a_traceback(served: Served) -> None:
    process = subprocess.Popen(
        [*CLI, "generate", "forever", "--target", served.target], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(7) == b"forever"

        os.kill(process.pid, signal.SIGINT)
        process.stdout.read()

        assert process.wait(20) == 130
        assert b"Traceback" not in process.stderr.read()
    assert served.fake.left.wait(20)
