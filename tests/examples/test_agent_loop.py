"""The agent loop, with a real Redis server."""

import pytest

from tests.examples.running import BASE, import_example
from tests.helpers.stores import redis_location, shared_server

__all__ = ["redis_location", "shared_server"]


@pytest.fixture(scope="module")
def example():
    return import_example("agent_loop")


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


def test_each_step_and_a_second_agent_find_what_was_read_before(example, redis_location, capsys):
    options = ("--model", str(BASE), "--store", redis_location, "--steps", "2")
    reused = []
    for task in ("What is 17 times 23?", "What is the date?"):
        example.main([*options, "--task", task])
        lines = [line for line in capsys.readouterr().out.splitlines() if "prompt tokens from the store" in line]
        reused.append([int(line.split()[0]) for line in lines])
        tokens = [int(line.split()[2]) for line in lines]
        assert reused[-1][1] > 0.8 * tokens[0], "the second step goes on from the first"
    assert reused[0][0] == 0
    assert reused[1][0] > 100, "the second agent finds instructions and tools"
