"""`megacpp completion`: what a shell needs to complete megacpp's arguments."""

import argparse
from typing import Any

_EPILOG = """\
examples:
  eval "$(megacpp completion bash)"        in ~/.bashrc
  megacpp completion zsh
  megacpp completion fish
"""
_BASH = """\
_megacpp() {
  local IFS=$'\\n'
  COMPREPLY=($(megacpp completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -o bashdefault -F _megacpp megacpp
"""
_SCRIPTS = {
    "bash": _BASH,
    "zsh": "autoload -Uz bashcompinit && bashcompinit\n"
    + _BASH.replace("local IFS", "setopt local_options KSH_ARRAYS; local IFS"),
    "fish": 'complete -c megacpp -a "(megacpp completion words -- '
    '(commandline -opc)[2..] (commandline -ct))"\n',
}


def register(subparsers: Any) -> None:
    """Add `completion`."""
    parser = subparsers.add_parser(
        "completion",
        help="a script with which a shell completes megacpp's arguments",
        description="Print the script for a shell. With `words`, print what may come next after "
        "WORD..., the last of which may be incomplete.",
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=[*_SCRIPTS, "words"], metavar="SHELL",
        help="bash, zsh or fish")  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="WORD", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script, or the candidates."""
    if args.shell != "words":
        print(_SCRIPTS[args.shell], end="")
        return 0
    from megacpp_mcore.cli import build_parser

    print("\n".join(candidates(build_parser(), args.words)))
    return 0


def candidates(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Completions of the last of `words`: commands, options, choices, recipes or keys."""
    *before, begun = words or [""]
    last = ""
    for word in before:
        commands = _commands(parser)
        if word in commands:
            parser = commands[word]
        last = word
    found: list[str] = []
    takes = _option(parser, last)
    if takes is not None and takes.nargs != 0:
        found = _values(takes)
    elif begun.startswith("-"):
        found = [option for action in parser._actions for option in action.option_strings]
    elif commands := _commands(parser):
        found = [*commands]
    else:
        found = [value for action in parser._actions
                 if not action.option_strings for value in _values(action)]  # fmt: skip
    return sorted({word for word in found if word.startswith(begun)})


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    return parser._option_string_actions.get(word) if word.startswith("-") else None


def _values(action: argparse.Action) -> list[str]:
    """Values of an argument: its choices, or what its metavar names; []: files, for the shell."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.metavar == "RECIPE" or action.dest in ("recipe", "extends"):
        from megacpp_mcore.recipe.source import shipped

        return shipped()
    if action.metavar == "A.B=C":
        from megacpp_mcore.recipe.source import KEYS

        return [f"{key}=" for key in KEYS]
    if action.dest == "surface":
        from megacpp_mcore.surfaces.registry import REGISTRY

        targets = [] if action.option_strings else ["layer", "model"]  # of `megacpp bench`
        return [*REGISTRY, *targets]
    return []
