"""`hetu-fx completion SHELL`: a script that completes commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from hetu_fx.errors import EnvironmentProblem

_BASH = """\
_hetu_fx() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ ${{COMP_WORDS[i]}} == -- ]] && {{ COMPREPLY=($(compgen -o default -- "$word")); return; }}
        [[ -z $command && ${{COMP_WORDS[i]}} != -* ]] && command=${{COMP_WORDS[i]}}
    done
    local words
    case $command in
        "") words="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _hetu_fx hetu-fx
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
SHELLS = ("bash", "zsh", "fish")


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell, to be read by it: `source <(hetu-fx completion bash)`."""
    commands = _commands_of(parser)
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    if shell not in SHELLS:
        raise EnvironmentProblem(f"no completion for {shell!r}; name one of {', '.join(SHELLS)}")
    cases = "\n".join(f'        {name}) words="{" ".join(_options(own))}" ;;' for name, own in commands.items())
    script = _BASH.format(commands=" ".join(commands), cases=cases)
    return _ZSH + script if shell == "zsh" else script


def _commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of all commands."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            return action.choices
    return {}


def _shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.help != argparse.SUPPRESS)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    words = [option for action in _shown(parser) for option in action.option_strings if option.startswith("--")]
    choices = [str(word) for action in _shown(parser) if not action.option_strings for word in action.choices or ()]
    return words + choices


def _fish(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, parser in commands.items():
        yield f"complete -c hetu-fx -n __fish_use_subcommand -a {name} -d {_quoted(parser.description or '')}"
        for action in _shown(parser):
            for option in (option for option in action.option_strings if option.startswith("--")):
                takes = " -r" if action.nargs != 0 else ""
                condition = _quoted(f"__fish_seen_subcommand_from {name}")
                yield f"complete -c hetu-fx -n {condition} -l {option[2:]}{takes} -d {_quoted(_plain(action.help))}"


def _plain(text: str | None) -> str:
    return (text or "").partition(" (default")[0]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
