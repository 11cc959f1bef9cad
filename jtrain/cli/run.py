"""One way to declare a command line and to run it: verbs, sub-verbs, options, mistakes and exit codes.

A verb is a `Verb` in a module of this folder, its work one or more `Command`s. A user's mistake, in the
options or later, is a `UserError`, which `run` alone turns into a message and an exit code. Imports no jax,
so that `--help` answers at once.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, override

from jtrain.config.other_names import known_elsewhere, other_unit
from jtrain.errors import AwayError, HardwareFault, UserError, did_you_mean
from jtrain.runtime import exit_codes
from jtrain.runtime.atomic_io import is_away
from jtrain.runtime.output import keep_going_without_readers
from jtrain.runtime.secrets import without_secrets

Args = argparse.Namespace
"""Parsed options of a command, with `words` as the user wrote them, and the `stdout` of the process."""

WrongValue = argparse.ArgumentTypeError
"""Raised by the `type` of an option; the message follows the option's name and has no full stop."""

STDOUT = Path("-")
"""Value of `--json` that means standard output."""


_THRESHOLD = gc.get_threshold()


def collect_as_before() -> None:
    """Ends the rare collections of a start: what runs for weeks frees its cycles as other programs do."""
    gc.set_threshold(*_THRESHOLD)


def run(main: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    A `UserError`, or an OSError that names a file, is printed as a message and gives exit code 2, a
    `HardwareFault` 76, an `AwayError` or an OSError of a full disk or a silent server 77. Every other
    exception is a bug and keeps its traceback.
    """
    # First of all: errors of the command itself must reach a closed pipe, too.
    keep_going_without_readers()
    # Before the imports of jax, whose objects stay alive: collections at Python's threshold of 700 find nothing in
    # them and take 0.2 s of each start. A training goes back to that threshold (`collect_as_before`).
    gc.set_threshold(20_000)
    try:
        return main()
    except KeyboardInterrupt:
        return 130  # shells report SIGINT as 130; during training the loop catches it, saves, and returns 75
    except (UserError, HardwareFault, OSError) as error:
        # An OSError without a file is a bug of ours; one with a file is the user's path.
        if isinstance(error, OSError) and not isinstance(error, UserError) and error.filename is None:
            raise
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        if isinstance(error, HardwareFault):
            return exit_codes.FAULTY_HARDWARE
        if isinstance(error, AwayError) or (not isinstance(error, UserError) and is_away(error)):
            return exit_codes.AWAY
        return exit_codes.REFUSED


class Parser(argparse.ArgumentParser):
    """Parser whose refusals are `UserError`s, with the nearest name of a misspelt option."""

    def __init__(self, prog: str, *, description: str, epilog: str, listing: str = "") -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.listing = listing

    @override
    def error(self, message: str) -> Any:
        # argparse writes `argument --x: ...`; the option's name is enough.
        message = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        setting = re.match(r"unrecognized arguments: ([a-z][\w.]*=\S*)", message)
        hint = f"Did you mean --set {setting[1]}? " if setting and self._takes("--set") else ""
        raise UserError(f"{message}. {hint}{self._help}")

    def _takes(self, option: str) -> bool:
        return option in self._option_string_actions

    def _hint(self, word: str) -> str:
        """Suggestion for an option that is not there: the field or option of that meaning, or the nearest
        name.
        """
        name, equals, value = word.partition("=")
        alias = known_elsewhere(name)
        if alias is not None and self._takes(alias):
            return f"Did you mean {alias}? "
        # `--lr 1e-3` and `--model.num_layers=2` are fields, which --set sets.
        field = alias or (name[2:] if "." in name else None)
        if field is not None and not field.startswith("--") and self._takes("--set"):
            unit = other_unit(name)
            setting = field if "=" in field else f"{field}={value if equals and not unit else 'VALUE'}"
            return f"Did you mean --set {setting}{unit and f' ({unit})'}? "
        return did_you_mean(name, self._option_string_actions)

    @property
    def _help(self) -> str:
        return f"`{self.prog} --help` lists the options."

    @override
    def format_help(self) -> str:
        return super().format_help() + self.listing

    def parse(self, words: Sequence[str]) -> Args:
        """Parses the words after the command.

        Raises:
          UserError: an option is misspelt, missing or wrong.
        """
        # Misspelt names come first: argparse would say that the option which was meant is missing.
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name != "--" and not self._takes(name):
                raise UserError(f"no option {name}. {self._hint(word)}{self._help}")
        # Args with the words, so that a command can be repeated as it was typed.
        return self.parse_args(words, Args(words=list(words)))


@dataclasses.dataclass(frozen=True)
class Command:
    """A verb's work, or one of its sub-verbs.

    summary: a line for lists of commands, without a full stop.
    execute: returns the exit code; raises UserError.
    add_options: declares the options.
    description: sentences for `--help`; "" takes the summary.
    exits: what the exit codes mean here.
    subject: option whose value may stand alone: with `config`, `plan llama8b` is `plan --config llama8b`.
    next_command: returns the command to suggest after this one; "" for none.
    ignores_unknown: True for a command that is given the options of another one.
    """

    summary: str
    execute: Callable[[Args], int]
    add_options: Callable[[Parser], None] = lambda parser: None
    description: str = ""
    exits: str = exit_codes.line(exit_codes.DONE, exit_codes.REFUSED, exit_codes.BUG)
    subject: Literal["", "config", "workdir", "source", "from", "field"] = ""
    ignores_unknown: bool = False
    next_command: Callable[[Args], str] = lambda args: ""

    def parser(self, prog: str, listing: str = "") -> Parser:
        """Returns the parser of the options."""
        description = self.description or f"{self.summary[0].upper()}{self.summary[1:]}."
        parser = Parser(prog, description=description, epilog=self.exits, listing=listing)
        self.add_options(parser)
        for action in parser._actions:
            if self.subject and f"--{self.subject}" in action.option_strings:
                action.help = f"{action.help}; its value may also stand alone"
        return parser

    def name_subject(self, words: Sequence[str]) -> list[str]:
        """The words with the option of the subject before the one word that no option takes, wherever it is; of
        several such words, if it takes several, before all of them.
        """
        option, is_help = f"--{self.subject}", {"-h", "--help"} & {*words}
        if not self.subject or is_help or option in (word.partition("=")[0] for word in words):
            return [*words]
        if words and not words[0].startswith("-"):
            return [option, *words]
        # A parser that requires nothing finds the words that are left over.
        lenient = self.parser("")
        for part in (*lenient._actions, *lenient._mutually_exclusive_groups):
            part.required = False

        def has_no_subject(words: Sequence[str]) -> bool:
            with contextlib.suppress(UserError):
                return not unused_words(words)
            return False

        def unused_words(words: Sequence[str]) -> list[str]:
            return [word for word in lenient.parse_known_args(words)[1] if not word.startswith("-")]

        try:
            subjects = unused_words(words)
        except UserError:  # said by the parser of the command itself
            return [*words]
        if any(action.nargs == "+" and option in action.option_strings for action in lenient._actions):
            rest = [word for word in words if word not in subjects]
            return [*rest, option, *subjects] if subjects else [*words]
        if len(subjects) != 1 or "=" in subjects[0]:
            return [*words]
        # The same text may be the value of an option too: without the subject no word is left over. The last
        # such word, as the first one may be that value.
        positions = [
            position
            for position, word in enumerate(words)
            if word == subjects[0] and has_no_subject([*words[:position], *words[position + 1 :]])
        ]
        return [*words[: positions[-1]], option, *words[positions[-1] :]] if positions else [*words]

    def main(self, prog: str, words: Sequence[str], listing: str = "") -> int:
        """Parses the words after the command and runs it; returns the exit code."""
        parser = self.parser(prog, listing)
        words = self.name_subject(words)
        args = parser.parse_known_args(words)[0] if self.ignores_unknown else parser.parse(words)
        # Kept before it is redirected: `--json -` is all that a pipe should get.
        args.stdout = sys.stdout
        # JSON on the standard output is alone there, without the tables of the command.
        as_json = getattr(args, "json", None) == STDOUT
        with contextlib.redirect_stdout(io.StringIO()) if as_json else contextlib.nullcontext():
            code = self.execute(args)
        # After the output, and on the error stream: a pipe gets what the command prints, and no advice.
        sys.stdout.flush()
        if code == exit_codes.DONE and (command := self.next_command(args)):
            print(f"next: {without_secrets(command)}", file=sys.stderr)
        return code


@dataclasses.dataclass(frozen=True)
class Verb:
    """`python -m jtrain.NAME`, which is `jtrain NAME`.

    name: module of `jtrain` that runs the verb.
    alone: command without a sub-verb; None where there has to be one.
    commands: sub-verb -> its command.
    """

    name: str
    alone: Command | None = None
    commands: Mapping[str, Command] = dataclasses.field(default_factory=dict[str, Command])
    summary: str = ""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command line, sys.argv by default; returns the exit code."""
        words = list(sys.argv[1:] if argv is None else argv)
        return run(lambda: self._dispatch(words))

    def _dispatch(self, words: list[str]) -> int:
        prog = f"python -m jtrain.{self.name}"
        # A name of a command wins over a subject of the same name.
        if self.commands and words and not words[0].startswith("-"):
            name = words[0]
            if name in self.commands:
                return self.commands[name].main(f"{prog} {name}", words[1:])
            nearest = did_you_mean(name, self.commands)
            subject = "" if self.alone is None else self.alone.subject
            # A word near a command's name is taken for a misspelt command.
            if nearest or not subject:
                advice = (
                    f"--{subject}={name} is a {subject} of that name"
                    if subject
                    else "everything else is an option"
                )
                raise UserError(
                    f"no command {name} of `{prog}`. {nearest}There are: {', '.join(self.commands)}; "
                    f"{advice}, as `{prog} --help` lists them."
                )
        # Without commands, the verb itself is the command.
        alone = self.alone or Command(self.summary, self._refuse)
        if not words and self.commands and any(action.required for action in alone.parser(prog)._actions):
            self._refuse(Args())
        return alone.main(prog, words, self._listing())

    def _refuse(self, args: Args) -> int:
        del args
        subject = "" if self.alone is None else f", or --{self.alone.subject}"
        raise UserError(
            f"`python -m jtrain.{self.name}` needs a command, one of {', '.join(self.commands)}{subject}."
        )

    def _listing(self) -> str:
        """Text of `--help` with a line for each sub-verb."""
        lines = [f"  {name:10} {command.summary}\n" for name, command in self.commands.items()]
        return "".join(["\ncommands (each has its own --help):\n", *lines]) if lines else ""


def write_json(args: Args, content: object) -> None:
    """Writes what `--json` asks for; nothing without it."""
    text = json.dumps(content, indent=1) + "\n"
    if args.json == STDOUT:
        args.stdout.write(text)
    elif args.json is not None:
        args.json.write_text(text)
