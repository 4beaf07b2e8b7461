"""The agent loop, with a real Redis server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples.running import BASE, import_example, output_of, start_example
from tests.stores.blob_helpers import Server


@pytest.fixture(scope="module")
def example():
    return import_example("agent_loop")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("multiply([17, 23])", "391"),
        ("add([2, 3])", "5.0"),
        ("finish('done')", "done"),
        ("finish(", "error: "),
        ("exit()", "error: call one of multiply, add, today, finish"),
        ("add.__class__()", "error: call one of"),
        ("add(__import__('os'))", "error: "),
        ("add('a')", "error: "),
        ("today(1)", "error: "),
    ],
)
def test_tools_are_called_with_literals_and_nothing_else_runs(example, call, result):
    assert example.run_tool(call).startswith(result)


def test_each_step_and_a_second_agent_find_what_was_read_before(redis_server):
    options = ("--model", BASE, "--store", redis_server.location, "--steps", 2)
    reused = []
    for task in ("What is 17 times 23?", "What is the date?"):
        out = output_of(start_example("agent_loop", *options, "--task", task))
        lines = [line for line in out.splitlines() if "prompt tokens from the store" in line]
        reused.append([int(line.split()[0]) for line in lines])
        tokens = [int(line.split()[2]) for line in lines]
        assert reused[-1][1] > 0.8 * tokens[0], "the second step goes on from the first"
    assert reused[0][0] == 0
    assert reused[1][0] > 100, "the second agent finds instructions and tools"
