"""The heartbeat of a process that ends."""

from tests.processes import program, run_together


def test_a_process_ends_only_when_its_heart_has_read_the_compiled_program() -> None:
    """Python would abort it: reading is C++ code in a thread, which must not be there when the interpreter
    closes.
    """
    [ended] = run_together([program(__file__, "end_while_reading")], [{}])
    assert (ended.code, ended.output) == (0, "described\n"), ended.errors
