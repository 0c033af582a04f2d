"""`headgate completion SHELL`: a script that completes commands and options. It is printed, not installed."""

from __future__ import annotations

import argparse

from headgate.cli.main import COMMANDS, command_parser

_EXAMPLE = """\
example:
  headgate completion bash
  eval "$(headgate completion bash)"              # in ~/.bashrc
  headgate completion zsh > ~/.zfunc/_headgate    # a folder of $fpath
  headgate completion fish > ~/.config/fish/completions/headgate.fish
"""

_BASH = """\
_headgate() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="@commands@ --help --version"
  else
    case "$previous" in
      @folders@) COMPREPLY=($(compgen -d -- "$current")); return ;;
      @values@) COMPREPLY=(); return ;;
    esac
    case "${COMP_WORDS[1]}" in
@cases@
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o bashdefault -o default -F _headgate headgate
"""

_ZSH = """\
#compdef headgate
_headgate() {
  if (( CURRENT == 2 )); then
    compadd -- @commands@ --help --version
    return
  fi
  case "$words[CURRENT-1]" in
    @folders@) _files -/; return ;;
    @values@) return ;;
  esac
  case "$words[2]" in
@cases@
  esac
  _files
}
compdef _headgate headgate
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.description = "Print a script that completes commands and options of headgate in your shell."
    parser.epilog = _EXAMPLE
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](), end="")
    return 0


def _words() -> dict[str, list[str]]:
    """The words that may follow each command: its options and the choices of its arguments."""
    return {name: sorted({word for action in _actions(name) for word in _of(action)}) for name in COMMANDS}


def _actions(name: str) -> list[argparse.Action]:
    return command_parser(name)._actions  # argparse has no other way to ask


def _of(action: argparse.Action) -> list[str]:
    return list(action.option_strings) or [str(choice) for choice in action.choices or ()]


def _with_values() -> tuple[list[str], list[str]]:
    """Options that a folder follows, and options that another value follows."""
    valued = [action for name in COMMANDS for action in _actions(name) if action.option_strings and action.nargs != 0]
    folders = {word for action in valued for word in action.option_strings if action.metavar == "DIR"}
    others = {word for action in valued for word in action.option_strings if action.metavar != "DIR"}
    return sorted(folders), sorted(others)


def _filled(script: str, case: str) -> str:
    folders, others = _with_values()
    cases = "\n".join(case.format(name=name, words=" ".join(words)) for name, words in _words().items())
    for place, text in {
        "@commands@": " ".join(COMMANDS),
        "@folders@": "|".join(folders),
        "@values@": "|".join(others),
        "@cases@": cases,
    }.items():
        script = script.replace(place, text)
    return script


def _bash() -> str:
    return _filled(_BASH, '      {name}) words="{words}" ;;')


def _zsh() -> str:
    return _filled(_ZSH, "    {name}) compadd -- {words} ;;")


def _fish() -> str:
    lines = ["complete -c headgate -f"]
    for name, does in COMMANDS.items():
        lines.append(f"complete -c headgate -n __fish_use_subcommand -a {name} -d '{does}'")
    for name in COMMANDS:
        for action in _actions(name):
            lines += [_fish_line(name, action, word) for word in _of(action)]
    return "\n".join(lines) + "\n"


def _fish_line(name: str, action: argparse.Action, word: str) -> str:
    when = f"complete -c headgate -n '__fish_seen_subcommand_from {name}'"
    if not word.startswith("-"):
        return f"{when} -a {word}"
    spelt = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
    files = " -r -F" if action.metavar == "DIR" else " -x" if action.nargs != 0 else ""
    return f"{when} {spelt}{files}"
